"""Helpers of the queue: changes that Ctrl-C does not interrupt, counted conditions, deadlines and descriptions.

Python raises `KeyboardInterrupt` between any two operations of the main thread. An interrupted change could leave a
closure that is counted and never runs, or a worker that is never woken. Ctrl-C does not interrupt the workers' threads.
"""

import _signal  # type: ignore[import-not-found]
import functools
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from coordinator.queueing.queue_state import QueueState

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uninterrupted(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorates a function that must not wait. In the main thread, a first Ctrl-C takes effect when it returns.

    A second Ctrl-C takes effect immediately, in case a user's callback does not return.
    """

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        # `signal` converts handlers to enumerations, which takes ten times as long as the rest of this function.
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


class CountedCondition(threading.Condition):
    """A condition that counts its waiters, because notifying costs several Python calls even if no thread waits.

    `waiters` is guarded by the lock; an interrupted wait may remain counted.
    """

    waiters = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waiters += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiters -= 1


def deadline_after(timeout: float | None) -> float | None:
    """Returns the end of a timeout in seconds on the `time.monotonic` clock; None for no timeout."""
    return None if timeout is None else time.monotonic() + timeout


def description(state: QueueState) -> str:
    now = state.now()
    shown = [
        f"{attempt.closure} on worker {attempt.worker} for {now - attempt.started:.1f} s (attempt {attempt.number})"
        for attempt in list(state.running)[:10]
    ]
    more = len(state.running) - len(shown)
    running = ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "nothing"
    quiet = "".join(f"strategy.quiet() was entered in {thread.name}" for thread in [*state.quiet.values()][:1])
    paused = f"; no closure is started because {state.paused or quiet}" if state.is_paused_or_quiet else ""
    return f"{state.waiting.count} closures wait, running: {running}{paused}"
