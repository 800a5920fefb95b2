"""Changes of the queue that Ctrl-C does not cut in two.

Python raises `KeyboardInterrupt` between any two operations of the main thread. Half a change would be left for ever: a
closure that is counted and never runs, a worker that is never woken. The workers' threads are not interrupted.
"""

import _signal  # type: ignore[import-not-found]
import functools
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uninterrupted(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorates a function that must not wait: in the main thread, Ctrl-C takes effect when it has returned.

    A second Ctrl-C takes effect at once, in case that a callback of a user does not return.
    """

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        # The module `signal` converts the handlers to enumerations, which takes ten times as long as all of this.
        handler = _signal.getsignal(_signal.SIGINT)
        if not callable(handler):
            # Ctrl-C is ignored, or ends the process.
            return function(*args, **kwargs)
        received: list[tuple[int, FrameType | None]] = []

        def remember(number: int, frame: FrameType | None) -> None:
            received.append((number, frame))
            if len(received) > 1:
                handler(number, frame)

        _signal.signal(_signal.SIGINT, remember)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(_signal.SIGINT, handler)
            if len(received) == 1:
                handler(*received[0])

    return call
