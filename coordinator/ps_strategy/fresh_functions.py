"""Which functions are to be traced anew, although they were traced before."""

import weakref
from typing import Any

from coordinator.ps_strategy import tensorflow_internals


class FreshFunctions:
    """What is traced in place of each `tf.function`: the function itself, unless it was traced before `begin_anew`."""

    def __init__(self) -> None:
        self._traced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stale: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stands_for: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def begin_anew(self) -> None:
        """From now on, another function stands for each that was traced before this."""
        self._stale |= self._traced
        self._stands_for = weakref.WeakKeyDictionary()

    def of(self, function: Any) -> Any:
        """The function to trace, which is traced then: the same one each time, until `begin_anew` is called again."""
        if function not in self._stale:
            self._traced.add(function)
            return function
        if function not in self._stands_for:
            self._stands_for[function] = tensorflow_internals.fresh(function)
        return self._stands_for[function]
