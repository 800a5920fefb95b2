"""Futures as values of a graph: a number that is the handle of a future, which lives as long as the number is used.

TensorFlow's tensors share the memory of the array that Python returns for a handle, and keep the array. So the future
is kept by the tensors that are its handle, wherever the graph takes them, and released with the last of them. A handle
is an int32, which TensorFlow keeps in the memory of the host, also where the graph runs on a GPU.
"""

import itertools
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.future import Future

# TensorFlow uses the memory of an array, and does not copy it, if its address is a multiple of this, in bytes.
_ALIGNMENT = 64
# How many handles there are; those of futures that are gone are used again.
_HANDLES = 1 << 31


class GraphFuture(tf.experimental.ExtensionType):
    """The result of a function that a function on the client schedules, before it exists.

    It may be an argument of `strategy.schedule` and of `strategy.local_results`, a variable of a loop, and a result.

    Attributes:
      handle: int32 []; identifies the future. The future lives as long as this tensor or an alias of it.
      result_type: the number of the type of its result.
    """

    handle: tf.Tensor
    result_type: int


class _Handle(np.ndarray):
    """The memory of the handle of a future, which TensorFlow's tensors share; an int32 scalar.

    Attributes:
      future: the future.
    """

    future: Future


class Futures:
    """The futures whose handles are in use."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._handles: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()

    def add(self, future: Future) -> Any:
        """Returns a handle of a future."""
        memory = np.empty(_ALIGNMENT + 4, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        # NumPy leaves out views of another type between an array and the memory, so there are two views of this type.
        handle: Any = memory[start : start + 4].view(np.int32).view(_Handle).reshape([])
        numbers = (number % _HANDLES for number in self._numbers)
        number = next(number for number in numbers if number not in self._handles)
        handle[...] = number
        handle.future = future
        self._handles[number] = handle
        return handle

    def __getitem__(self, handle: Any) -> Future:
        """Returns the future with a handle."""
        found = self._handles.get(int(handle))
        if found is None:
            raise ValueError(
                "A future of a tf.function on the client does not exist any more. It lives as long as the GraphFuture "
                "that schedule returned, and not as a copy of its handle; and no longer than its strategy."
            )
        return found.future

    def __len__(self) -> int:
        return len(self._handles)
