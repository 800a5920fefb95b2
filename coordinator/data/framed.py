"""Files of examples of different sizes, with an index of where each begins."""

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.files import (
    FileParts,
    as_one_operation,
    checked_paths,
    concatenated,
    digest_of_files,
    index_path,
    shuffled_rows,
)
from coordinator.data.source import Source
from coordinator.data.worker_arrays import WorkerArrays

_logger = logging.getLogger("coordinator")


class FramedSource(Source):
    """A source of examples of different sizes in files, which the workers read.

    The index, 8 bytes for each example, is kept beside each file, and in the memory of each worker.

    Args:
      paths: of the files.
      name: of the function that was given them, for messages.
      parse: takes a vector of serialized examples, returns a structure of tensors; None returns the vector.
    """

    mixes_all = False

    def __init__(self, paths: Any, name: str, parse: Callable[[Any], Any] | None) -> None:
        self._name = name
        self._parse = parse
        given = checked_paths(paths, name)
        # Where each example of a file begins, and the end of the last one.
        starts = [self._index(path) for path in given]
        counts = [len(each) - 1 for each in starts]
        self.size = sum(counts)
        if not self.size:
            raise ValueError(f"{name} was given files without examples: {', '.join(given[:3])}.")
        self.digest = digest_of_files(given, counts)
        # Without those that have no examples: no bytes can be read of them.
        self._paths = [path for path, count in zip(given, counts, strict=True) if count]
        self._parts = FileParts(self._paths, [count for count in counts if count])
        self._on_workers = WorkerArrays([concatenated([each for each in starts if len(each) > 1])])

    @abstractmethod
    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        """Returns where each example of a file begins, and the end of the last one, in bytes."""

    def _examples(self, starts: Any, maps: Sequence[Any], start: Any, count: Any) -> Any:
        """Reads `count` examples from number `start` of all files on, as a string vector.

        Args:
          starts: where each example begins in its file: of each file one more than it has examples.
          maps: see `FileParts.read`.
          start: an int64 scalar.
          count: likewise.
        """
        numbers = start + tf.range(count)
        # Each file has one start more than examples.
        places = numbers + self._parts.files_of(numbers)
        sizes = tf.gather(starts, places + 1) - tf.gather(starts, places)
        data = self._parts.read(maps, start, start + count - 1, lambda file, numbers: tf.gather(starts, numbers + file))
        return self._unframed(data, tf.cumsum(sizes, exclusive=True), sizes)

    @abstractmethod
    def _unframed(self, data: Any, begins: Any, sizes: Any) -> Any:
        """Returns the examples in some bytes, a string vector.

        Args:
          data: the bytes, a string scalar.
          begins: where each example begins in them, an int64 vector.
          sizes: how many it has, likewise.
        """

    def prepare(self, strategy: Any) -> None:
        """Gives each worker the index, and has it map the files, when it first reads."""
        self._on_workers.prepare(strategy)
        self._parts.prepare(strategy)

    def read_range(self, positions: Any) -> Any:
        """See `Source.read_range`."""
        given = self._on_workers.read()[0], *self._parts.maps()
        examples = as_one_operation(self._serialized, tf.cast(positions, tf.int64), *given)
        return examples if self._parse is None else self._parse(examples)

    def _serialized(self, positions: Any, starts: Any, *maps: Any) -> Any:
        _, start, count, _, _ = tf.unstack(positions, num=5)
        # Before they are parsed, since a string is moved without a copy.
        return shuffled_rows(self._examples(starts, maps, start, count), positions)

    def _index(self, path: str) -> np.ndarray[Any, Any]:
        """Returns the starts that were kept beside a file, or finds and keeps them."""
        beside, stat = index_path(path, self._name), tf.io.gfile.stat(path)
        state = [int(stat.length), int(stat.mtime_nsec)]
        if tf.io.gfile.exists(beside):
            with tf.io.gfile.GFile(beside, "rb") as file:
                kept = np.load(file, allow_pickle=False)
            if kept[:2].tolist() == state:
                return kept[2:]
        starts = np.asarray(self._starts(path), np.int64)
        temporary = f"{beside}.{os.getpid()}.tmp"
        try:
            with tf.io.gfile.GFile(temporary, "wb") as file:
                np.save(file, np.concatenate([np.array(state, np.int64), starts]))
            tf.io.gfile.rename(temporary, beside, overwrite=True)
        except tf.errors.OpError as error:
            _logger.info("The index of %s is not kept for the next time: %s", path, error)
        return starts

    def __repr__(self) -> str:
        return f"<coordinator.data.{self._name}: {self.size} examples in {len(self._paths)} files>"


def read_blocks(path: str, size: int = 2**24) -> Iterator[bytes]:
    """Yields the content of a file in blocks of bytes."""
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(size):
            yield block
