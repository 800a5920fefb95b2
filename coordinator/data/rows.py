"""Files of rows of one size: `.npy` files, or raw binary ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.arrays import arrays
from coordinator.data.files import FileParts, as_one_operation, checked_paths, digest_of_files, file_size, shuffled_rows
from coordinator.data.source import Source

# The size of a file's header in bytes, the dtype of its rows, and the shape of a row.
_Header = tuple[int, np.dtype[Any], tuple[int, ...]]


def rows(paths: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Source:
    """Returns a source of the rows of files, which the workers read.

    Args:
      paths: of `.npy` files, as `np.save` writes them; or of files of nothing but rows, of `dtype` and `shape`. All
        workers must be able to read them. A NumPy array is what `arrays` takes.
      dtype: of the numbers, little-endian; not for `.npy` files, which say it.
      shape: of a row; not for `.npy` files.

    Raises:
      TypeError, ValueError: the files are no such files, or not all alike.
      FileNotFoundError: a file does not exist.
    """
    return arrays(paths) if isinstance(paths, np.ndarray) else _Rows(checked_paths(paths, "rows"), dtype, shape)


class _Rows(Source):
    mixes_all = False

    def __init__(self, paths: Sequence[str], dtype: Any, shape: Sequence[int] | None) -> None:
        if (dtype is None) != (shape is None):
            raise ValueError("rows takes dtype and shape together, or neither for .npy files.")
        headers: list[_Header] = [
            _npy_header(path) if shape is None else (0, np.dtype(dtype), tuple(shape)) for path in paths
        ]
        _, self._dtype, self._shape = headers[0]
        for path, (_, other_dtype, other_shape) in zip(paths, headers, strict=True):
            if (other_dtype, other_shape) != (self._dtype, self._shape):
                raise ValueError(
                    f"The rows of {path!r} are of {other_dtype} {other_shape}, those of {paths[0]!r} of {self._dtype} "
                    f"{self._shape}: use a source for each kind."
                )
        if self._dtype.hasobject or self._dtype.byteorder == ">" or self._dtype.kind not in "biufc":
            raise ValueError(f"rows reads little-endian numbers, got {self._dtype}.")
        self._width = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._headers = [header for header, _, _ in headers]
        counts = [_count(path, header, self._width) for path, header in zip(paths, self._headers, strict=True)]
        self._firsts = np.cumsum([0, *counts])
        self.size = sum(counts)
        self.digest = digest_of_files(paths, counts)
        self._paths = paths
        self._parts = FileParts(paths, counts)

    def prepare(self, strategy: Any) -> None:
        """Has each worker map the files, when it first reads."""
        self._parts.prepare(strategy)

    def read_range(self, positions: Any) -> Any:
        """See `Source.read_range`."""
        return as_one_operation(self._rows, tf.cast(positions, tf.int64), *self._parts.maps())

    def _rows(self, positions: Any, *maps: Any) -> Any:
        _, start, count, _, _ = tf.unstack(positions, num=5)
        headers, firsts = tf.constant(self._headers, tf.int64), tf.constant(self._firsts, tf.int64)
        data = self._parts.read(
            maps, start, start + count - 1, lambda file, row: headers[file] + (row - firsts[file]) * self._width
        )
        if self._dtype == np.bool_:
            numbers = tf.cast(tf.io.decode_raw(data, tf.uint8), tf.bool)
        else:
            numbers = tf.io.decode_raw(data, tf.as_dtype(self._dtype))
        return shuffled_rows(tf.reshape(numbers, [-1, *self._shape]), positions)

    def __repr__(self) -> str:
        return f"<coordinator.data.rows: {self.size} examples in {len(self._paths)} files>"


def _count(path: str, header: int, width: int) -> int:
    count, rest = divmod(file_size(path) - header, width)
    if rest or not count:
        raise ValueError(
            f"{path!r} has {file_size(path) - header} bytes of rows, which is no positive multiple of {width}, the "
            "size of a row: check dtype and shape."
        )
    return count


def _npy_header(path: str) -> _Header:
    with tf.io.gfile.GFile(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
        except ValueError as error:
            text = f"{path!r} is no .npy file ({error}): give dtype and shape if it has rows alone."
            raise ValueError(text) from None
        header = file.tell()
    if is_fortran or not shape:
        raise ValueError(f"{path!r} has no rows one behind the other: save np.ascontiguousarray(array).")
    return header, dtype, shape[1:]
