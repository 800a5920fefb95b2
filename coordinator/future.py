"""The result to come of one scheduled closure."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any


class Future(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` whose result is NumPy values in the structure that the function returned.

    It works with `concurrent.futures.wait` and `as_completed`. `cancel()` withdraws a closure that waits, and cancels
    one that runs: what it has done by then stays done, but its result is not told. The result is on the client before
    the future is done, so it outlives the worker that made it.

    `result()` raises the function's own exception as itself, `ClosureCancelledError` for a closure that was withdrawn
    because another one failed, `ClosureInputError`, `ClosureQuarantined` or `ParameterServerLost`.

    Callbacks (`add_done_callback`) run on a worker's thread: keep them short, and never call `join` from one.

    Args:
      name: of the function.
      number: the closure's place in the order of scheduling.
      on_cancel: asks the queue to withdraw the closure; whether it could.
      origin: the strategy's own note of what the result will look like.

    Attributes:
      is_started: whether a worker runs the closure now; set by the queue.
    """

    def __init__(self, name: str, number: int, on_cancel: Callable[[], bool], origin: Any = None) -> None:
        super().__init__()
        self._name = name
        self._number = number
        self._on_cancel: Callable[[], bool] | None = on_cancel
        self.origin = origin
        self.is_started = False

    def running(self) -> bool:
        """Whether a worker runs the closure now."""
        return self.is_started and not self.done()

    def cancel(self) -> bool:
        """Withdraws the closure, or cancels the call if a worker runs it.

        Returns:
          Whether it is cancelled now; False if it has its outcome already.
        """
        on_cancel = self._on_cancel
        return self.cancelled() if on_cancel is None else on_cancel() or self.cancelled()

    # What follows is for the queue alone. The future stays pending to its base class while a worker runs the closure,
    # since it can be cancelled until the outcome is decided, and the queue decides that under its own lock.

    def tell_result(self, result: Any) -> None:
        """The closure gave its result."""
        self._forget_closure()
        self.set_result(result)

    def tell_error(self, error: BaseException) -> None:
        """The closure ended with an error."""
        self._forget_closure()
        self.set_exception(error)

    def tell_cancelled(self) -> None:
        """The closure was withdrawn as the user asked."""
        self._forget_closure()
        super().cancel()
        self.set_running_or_notify_cancel()

    def _forget_closure(self) -> None:
        """Undoes the circle between this future and its closure.

        Without it a result is freed as soon as its future is dropped, not when the garbage collector next comes round.
        """
        self._on_cancel = None

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
