"""Files whose examples are found by byte positions, and the reading of parts of them on the workers.

Workers are standard servers: what they read is described by operations of TensorFlow, which know all file systems that
TensorFlow has (`tf.io.gfile`). A range has consecutive examples, so that it is one part of a file, or of few.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.source import IN_ORDER, digest_of, shuffled

# In bytes: what a worker reads at a time, and what the digest has of a file.
_BUFFER = 2**18
_SAMPLE = 2**12


def checked_paths(paths: Any, name: str) -> list[str]:
    """Returns the paths of files.

    Args:
      paths: one, or several.
      name: of the function that was given them, for messages.

    Raises:
      TypeError: something else.
      ValueError: there is none.
      FileNotFoundError: a file does not exist.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Sequence) or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise TypeError(f"{name} takes the path of a file, or a list of paths, got {paths!r}.")
    if not paths:
        raise ValueError(f"{name} was given no path.")
    found = [os.fspath(each) for each in paths]
    for path in found:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"{name} was given {path!r}, which does not exist, or cannot be read from here.")
    return found


def file_size(path: str) -> int:
    """Returns the size of a file in bytes."""
    return int(tf.io.gfile.stat(path).length)


def digest_of_files(paths: Sequence[str], counts: Sequence[int]) -> str:
    """Returns a digest of the files' names, sizes, numbers of examples, and of the content of some of them."""

    def parts() -> Iterator[bytes]:
        for path, count in zip(paths, counts, strict=True):
            yield f"{os.path.basename(path)} {file_size(path)} {count}".encode()
        for path in dict.fromkeys((paths[0], paths[len(paths) // 2], paths[-1])):
            with tf.io.gfile.GFile(path, "rb") as file:
                yield file.read(_SAMPLE)

    return digest_of(parts())


class FileParts:
    """The parts of files that ranges of examples take, as operations.

    Args:
      paths: of the files.
      counts: the number of examples of each.
    """

    def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
        self._paths = list(paths)
        self._sizes = [file_size(path) for path in paths]
        # The number of the first example of each file, and that after the last of all.
        self._firsts = [0, *itertools.accumulate(counts)]

    def files_of(self, numbers: Any) -> Any:
        """Returns the index of the file of each example, of int64 vectors of numbers of examples."""
        if len(self._paths) == 1:
            return tf.zeros_like(numbers)
        return tf.searchsorted(tf.constant(self._firsts[1:], tf.int64), numbers, side="right", out_type=tf.int64)

    def read(self, first: Any, last: Any, position_of: Any) -> Any:
        """Reads the bytes of some examples, across files.

        Args:
          first: the number of the first example, an int64 scalar.
          last: that of the last one.
          position_of: takes the index of a file and the number of an example in all files, or that after the last of
            the file; returns where it begins in the file, in bytes.

        Returns:
          A string scalar.
        """
        firsts = tf.constant(self._firsts, tf.int64)

        def read_part(file: Any) -> Any:
            begin = position_of(file, tf.maximum(first, firsts[file]))
            end = position_of(file, tf.minimum(last + 1, firsts[file + 1]))
            return _read_bytes(tf.constant(self._paths)[file], begin, end, tf.constant(self._sizes, tf.int64)[file])

        if len(self._paths) == 1:
            return read_part(tf.constant(0, tf.int64))
        ends = self.files_of(tf.stack([first, last]))

        def read_parts() -> Any:
            parts = tf.map_fn(read_part, tf.range(ends[0], ends[1] + 1), fn_output_signature=tf.string)
            return tf.strings.reduce_join(parts)

        return tf.cond(ends[0] == ends[1], lambda: read_part(ends[0]), read_parts)


def shuffled_rows(rows: Any, positions: Any) -> Any:
    """Returns the examples of a range in another order, if the epoch is shuffled.

    Args:
      rows: a structure of tensors with the examples along the first axis.
      positions: see `Source.read`.
    """
    _, _, count, number, seed = tf.unstack(tf.cast(positions, tf.int64), num=5)
    ordered = tf.range(count)
    order = tf.where(seed == IN_ORDER, ordered, shuffled(ordered, tf.stack([seed, number]), count))
    return tf.nest.map_structure(lambda each: tf.gather(each, order), rows)


def concatenated(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Returns int64 arrays as one."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _read_bytes(path: Any, begin: Any, end: Any, size: Any) -> Any:
    part = tf.raw_ops.FixedLengthRecordDatasetV2(
        filenames=path,
        header_bytes=begin,
        record_bytes=end - begin,
        footer_bytes=size - end,
        buffer_size=tf.constant(_BUFFER, tf.int64),
        compression_type="",
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=part, output_types=[tf.string], output_shapes=[[]])[0]
