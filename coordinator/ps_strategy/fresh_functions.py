"""Which functions are to be traced anew, although they were traced before."""

import weakref
from typing import Any

from coordinator.ps_strategy import tensorflow_internals


class FreshFunctions:
    """What is traced in place of each `tf.function`: the function itself, until `begin_anew`."""

    def __init__(self) -> None:
        self._stands_for: weakref.WeakKeyDictionary[Any, Any] | None = None

    def begin_anew(self) -> None:
        """From now on, nothing stands for a function that was traced before this."""
        self._stands_for = weakref.WeakKeyDictionary()

    def of(self, function: Any) -> Any:
        """The function to trace: the same one each time, until `begin_anew` is called again."""
        if self._stands_for is None:
            return function
        if function not in self._stands_for:
            self._stands_for[function] = tensorflow_internals.fresh(function)
        return self._stands_for[function]
