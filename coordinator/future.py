"""The result to come of one scheduled closure.

A million of them may wait in a queue, and almost none of them is ever waited on before it is done. So what others wait
on, a condition with its lock and two lists, is made when somebody first does, and a future that is done tells its
outcome without it. Nothing else differs from `concurrent.futures`, whose functions find what they expect.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, ClassVar

_ENDS = (FINISHED, CANCELLED_AND_NOTIFIED, CANCELLED)


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
      on_cancel: asks the queue to withdraw the closure; whether it could. It may be set later.
      origin: the strategy's own note of what the result will look like.

    Attributes:
      is_started: whether a worker runs the closure now; set by the queue.
    """

    # Of all futures, held for a few assignments: by whoever makes a condition, and by whoever gives an outcome to a
    # future without one. An outcome must not appear while another thread looks at the state with the condition held.
    _conditions_lock: ClassVar = threading.Lock()

    __slots__ = (
        "_done_callbacks",
        "_exception",
        "_made_condition",
        "_name",
        "_number",
        "_result",
        "_state",
        "_waiters",
        "is_started",
        "on_cancel",
        "origin",
    )

    def __init__(self, name: str, number: int, on_cancel: Callable[[], bool] | None = None, origin: Any = None) -> None:
        # Not the base class's: that would make the condition.
        self._state = PENDING
        self._result = None
        self._exception = None
        self._made_condition: threading.Condition | None = None
        self._name = name
        self._number = number
        self.on_cancel = on_cancel
        self.origin = origin
        self.is_started = False

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What the base class and the functions of `concurrent.futures` lock this future with, and wait on."""
        if self._made_condition is None:
            with self._conditions_lock:
                if self._made_condition is None:
                    self._waiters = []
                    self._done_callbacks: list[Callable[[concurrent.futures.Future[Any]], object]] = []
                    self._made_condition = threading.Condition()
        return self._made_condition

    def done(self) -> bool:
        """Whether it has its outcome."""
        return self._state in _ENDS

    def cancelled(self) -> bool:
        """Whether the closure was cancelled by its user."""
        return self._state in {CANCELLED_AND_NOTIFIED, CANCELLED}

    def result(self, timeout: float | None = None) -> Any:
        """The closure's result.

        Args:
          timeout: how long to wait for it, in seconds; None for as long as it takes.

        Raises:
          TimeoutError: it is not there in time.
          concurrent.futures.CancelledError: the closure was cancelled by its user.
          BaseException: what it ended with.
        """
        if self._state is FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the closure ended with, None if it has a result; arguments and errors are those of `result`."""
        return self._exception if self._state is FINISHED else super().exception(timeout)

    def running(self) -> bool:
        """Whether a worker runs the closure now."""
        return self.is_started and not self.done()

    def cancel(self) -> bool:
        """Withdraws the closure, or cancels the call if a worker runs it.

        Returns:
          Whether it is cancelled now; False if it has its outcome already.
        """
        on_cancel = self.on_cancel
        return self.cancelled() if on_cancel is None else on_cancel() or self.cancelled()

    # What follows is for the queue alone. The future stays pending to its base class while a worker runs the closure,
    # since it can be cancelled until the outcome is decided, and the queue decides that under its own lock.

    def tell_result(self, result: Any) -> None:
        """The closure gave its result."""
        self._forget_closure()
        if not self._end_unwatched(FINISHED, result=result):
            self.set_result(result)

    def tell_error(self, error: BaseException) -> None:
        """The closure ended with an error."""
        self._forget_closure()
        if not self._end_unwatched(FINISHED, exception=error):
            self.set_exception(error)

    def tell_cancelled(self) -> None:
        """The closure was withdrawn as the user asked."""
        self._forget_closure()
        if not self._end_unwatched(CANCELLED_AND_NOTIFIED):
            super().cancel()
            self.set_running_or_notify_cancel()

    def _end_unwatched(self, state: str, result: Any = None, exception: BaseException | None = None) -> bool:
        """Gives it this outcome, if it has none and nobody has waited or asked to be called; whether that was so."""
        with self._conditions_lock:
            is_unwatched = self._made_condition is None and self._state is PENDING
            if is_unwatched:
                self._result = result
                self._exception = exception
                self._state = state
            return is_unwatched

    def _forget_closure(self) -> None:
        """Undoes the circle between this future and its closure.

        Without it a result is freed as soon as its future is dropped, not when the garbage collector next comes round.
        """
        self.on_cancel = None

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
