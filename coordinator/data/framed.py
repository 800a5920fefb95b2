"""Files of examples of different sizes, with an index of where each begins."""

import contextlib
import hashlib
import logging
import uuid
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
    file_size,
    index_path,
    shuffled_rows,
    written_ns,
)
from coordinator.data.source import Source
from coordinator.data.worker_arrays import WorkerArrays

_logger = logging.getLogger("coordinator")

_CHECKSUM_BYTES = 16


class FramedSource(Source):
    """A source of examples of different sizes in files, which the workers read.

    The index, 8 bytes for each example, is kept in a file beside each file, and in the memory of each worker. It is a
    cache: unless it is whole, and was made of the present file, it is made again.

    Args:
      paths: of the files.
      name: of the function that was given them, for messages.
      parse: takes a vector of serialized examples, returns a structure of tensors; None returns the vector.
    """

    mixes_all = False
    # Whether an index could not be kept, which is tried and logged once.
    _is_index_unkept = False

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
        written = written_ns(path)
        state = f"{self._name} {file_size(path)} {written}"
        # Without the time of the last change, a changed file of the same size would not be noticed.
        beside = index_path(path, self._name) if written else None
        starts = None if beside is None else _kept_index(beside, state)
        if starts is None:
            starts = np.asarray(self._starts(path), np.int64)
            if beside is not None and not self._is_index_unkept:
                self._is_index_unkept = not _keep_index(beside, state, starts)
        return starts

    def __repr__(self) -> str:
        return f"<coordinator.data.{self._name}: {self.size} examples in {len(self._paths)} files>"


def _kept_index(beside: str, state: str) -> np.ndarray[Any, Any] | None:
    """Returns the starts in an index; None if it is not whole, or was made of another state of the data file."""
    try:
        with tf.io.gfile.GFile(beside, "rb") as file:
            kept = np.load(file, allow_pickle=False)
    except Exception:  # noqa: BLE001 - NumPy raises anything for a damaged file
        return None
    if not isinstance(kept, np.ndarray) or kept.ndim != 1 or kept.dtype != np.int64:
        return None
    starts = kept[_CHECKSUM_BYTES // 8 :]
    return starts if np.array_equal(kept, _with_checksum(state, starts)) else None


def _keep_index(beside: str, state: str, starts: np.ndarray[Any, Any]) -> bool:
    """Writes the starts to a file, in one step; returns whether that succeeded, and logs it otherwise."""
    # The number of a process is not unique: it is 1 in every container.
    draft = f"{beside}.{uuid.uuid4().hex}.tmp"
    try:
        with tf.io.gfile.GFile(draft, "wb") as file:
            np.save(file, _with_checksum(state, starts))
        tf.io.gfile.rename(draft, beside, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        _logger.info("Indexes such as %s are not kept for the next time: %s", beside, error)
        with contextlib.suppress(OSError, tf.errors.OpError):
            tf.io.gfile.remove(draft)
        return False
    return True


def _with_checksum(state: str, starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the content of an index: a checksum of the state of the data file and of the starts, then the starts."""
    checksum = hashlib.blake2b(state.encode() + starts.tobytes(), digest_size=_CHECKSUM_BYTES).digest()
    return np.concatenate([np.frombuffer(checksum, np.int64), starts])


def read_blocks(path: str, size: int = 2**24) -> Iterator[bytes]:
    """Yields the content of a file in blocks of bytes."""
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(size):
            yield block
