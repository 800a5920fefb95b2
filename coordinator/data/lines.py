"""Text files, of which each line is an example."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.files import file_size
from coordinator.data.framed import FramedSource, read_blocks
from coordinator.data.source import Source


def lines(paths: Any, parse: Callable[[Any], Any] | None = None, skip: int = 0) -> Source:
    """Returns a source of the lines of text files, which the workers read.

    For CSV: `lines(paths, lambda lines: tf.io.decode_csv(lines, defaults), skip=1)`. An index of each file is written
    beside it, if that is possible, and read the next time.

    Args:
      paths: of the files, which are not compressed. All workers must be able to read them.
      parse: takes a vector of lines, without their ends, and returns a structure of tensors. None returns the vector.
      skip: the number of lines at the beginning of each file to skip, such as headers.

    Raises:
      TypeError: `paths` is neither a path nor a sequence of paths.
      ValueError: there are no lines.
      FileNotFoundError: a file does not exist.
    """
    return _Lines(paths, parse, skip)


class _Lines(FramedSource):
    def __init__(self, paths: Any, parse: Callable[[Any], Any] | None, skip: int) -> None:
        self._skip = skip
        super().__init__(paths, f"lines-{skip}" if skip else "lines", parse)

    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        size, begin, found = file_size(path), 0, [np.zeros(1, np.int64)]
        for block in read_blocks(path):
            found.append(begin + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")))
            begin += len(block)
        starts = np.concatenate(found)
        if starts[-1] != size:
            starts = np.append(starts, size)
        return starts[min(self._skip, len(starts) - 1) :]

    def _unframed(self, data: Any, begins: Any, sizes: Any) -> Any:
        return tf.strings.regex_replace(tf.strings.substr(data, begins, sizes), "\r?\n$", "")
