"""The result to come of one scheduled closure."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any


class Future(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` whose result is NumPy values in the structure that the function returned.

    It works with `concurrent.futures.wait` and `as_completed`. `cancel()` withdraws a closure that no worker has
    started; one that has started, even if it waits to be run again after its worker was lost, can't be cancelled. The
    result is on the client before the future is done, so it outlives the worker that made it.

    `result()` raises the function's own exception as itself, `ClosureCancelledError` for a closure that was withdrawn
    because another one failed, `ClosureInputError`, `ClosureQuarantinedError` or `ParameterServerLost`.

    Callbacks (`add_done_callback`) run on a worker's thread: keep them short, and never call `join` from one.
    """

    def __init__(self, name: str, number: int, on_cancel: Callable[[], None]) -> None:
        super().__init__()
        self._name = name
        self._number = number
        self._on_cancel: Callable[[], None] | None = on_cancel

    def cancel(self) -> bool:
        """Withdraws the closure if no worker has started it.

        Returns:
          Whether it is cancelled now.
        """
        on_cancel = self._on_cancel
        cancelled = super().cancel()
        if cancelled and on_cancel is not None:
            on_cancel()
        return cancelled

    def set_running_or_notify_cancel(self) -> bool:
        """For the queue alone: a worker starts the closure, or learns that it was cancelled."""
        may_run = super().set_running_or_notify_cancel()
        # What is told of a cancellation refers to the closure, which refers to this future. Without that circle a
        # result is freed as soon as its future is dropped, not when the garbage collector next comes round.
        self._on_cancel = None
        return may_run

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Calls `fn` with this future once it is done. What `fn` raises is logged and goes no further."""
        super().add_done_callback(functools.partial(_call_back, fn))

    def __repr__(self) -> str:
        if not self.done():
            outcome = "running" if self.running() else "waiting"
        elif self.cancelled():
            outcome = "cancelled"
        else:
            error = self.exception()
            outcome = "done" if error is None else f"raised {type(error).__name__}"
        return f"<Future of closure {self._number} ({self._name}): {outcome}>"


def _call_back(fn: Callable[[concurrent.futures.Future[Any]], object], future: concurrent.futures.Future[Any]) -> None:
    """Calls `fn` so that a `sys.exit()` in it cannot end the worker's thread, on which everybody else depends."""
    try:
        fn(future)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"A callback of {future} raised {type(error).__name__}; no thread ends by it.") from error
