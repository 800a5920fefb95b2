"""The future of one scheduled closure.

A million futures may wait in a queue, but few futures are waited on before they are done. A future's condition and lock
are therefore created on first use. A done future needs no condition to return its outcome and to call its callbacks. In
all other respects a future behaves as `concurrent.futures` expects.
"""

import abc
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, ClassVar

_ENDS = (FINISHED, CANCELLED_AND_NOTIFIED, CANCELLED)
# Shared by all futures without a callback; never changed.
_NO_CALLBACKS: list[Callable[[concurrent.futures.Future[Any]], object]] = []


class ValueElsewhere(abc.ABC):
    """The result of a closure that was not copied to the client: a `LeftResult` of `traced_function.py`."""

    @abc.abstractmethod
    def fetch(self, timeout: float | None = None) -> Any:
        """Copies the result to the client and returns it; see `Future.result`."""


class Future(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` whose result is NumPy values in the structure that the function returned.

    The future works with `concurrent.futures.wait` and `as_completed`. `cancel()` also cancels a running closure: the
    closure's effects so far stay, but its result is lost. The result is on the client before the future is done, so the
    result outlives the worker that computed it. With `schedule(..., fetch=False)` the result stays on the worker.

    `result()` raises the function's own exception unchanged, `ClosureCancelledError` for a closure that was cancelled
    because another closure failed, `ClosureInputError`, `ClosureQuarantined` or `ParameterServerLost`.

    Callbacks (`add_done_callback`) run on a worker's thread: keep callbacks short, and never call `join` in a callback.

    Args:
      name: the function's name.
      number: the closure's place in the order of scheduling.
      on_cancel: a function that cancels the closure and returns whether it was cancelled. May be set later.
      origin: the `TracedFunction` that was scheduled; identifies futures of this strategy and gives the result's specs.

    Attributes:
      is_started: whether a worker runs the closure now. Set by the queue.
      worker: the index of the worker that produced the outcome. Until there is an outcome, the index of the last worker
        that started the closure, or None if no worker has started it. Set by the queue.
      attempts: how many attempts have begun. Set by the queue.
    """

    # All futures share this lock, which is held for a few assignments only. Creating a condition and setting an outcome
    # exclude each other, so that no outcome appears while another thread holds the condition and reads the state.
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
        "attempts",
        "is_started",
        "on_cancel",
        "origin",
        "worker",
    )

    def __init__(self, name: str, number: int, on_cancel: Callable[[], bool] | None = None, origin: Any = None) -> None:
        # super().__init__ is not called, because it would create the condition.
        self._state = PENDING
        self._result = None
        self._exception = None
        self._made_condition: threading.Condition | None = None
        self._done_callbacks: list[Callable[[concurrent.futures.Future[Any]], object]] = _NO_CALLBACKS
        self._name = name
        self._number = number
        self.on_cancel = on_cancel
        self.origin = origin
        self.is_started = False
        self.worker: int | None = None
        self.attempts = 0

    @property
    def may_have_run_twice(self) -> bool:
        """Whether there was more than one attempt, so the function may have run twice, in part or as a whole."""
        return self.attempts > 1

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._made_condition is None:
            with self._conditions_lock:
                if self._made_condition is None:
                    self._waiters = []
                    self._done_callbacks = list(self._done_callbacks)
                    self._made_condition = threading.Condition()
        return self._made_condition

    def done(self) -> bool:
        """Returns whether the closure has an outcome."""
        return self._state in _ENDS

    def cancelled(self) -> bool:
        """Returns whether the user cancelled the closure."""
        return self._state in {CANCELLED_AND_NOTIFIED, CANCELLED}

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the closure's result and returns it.

        Args:
          timeout: how long to wait, in seconds; None for no limit.

        Raises:
          TimeoutError: there was no result in time.
          concurrent.futures.CancelledError: the user cancelled the closure.
          BaseException: the error with which the closure ended.
        """
        value = self.unfetched_result(timeout)
        return value.fetch(timeout) if isinstance(value, ValueElsewhere) else value

    def unfetched_result(self, timeout: float | None = 0) -> Any:
        """Returns the result, or a `ValueElsewhere` if it is still on a worker. See `result`."""
        if self._state is FINISHED and self._exception is None:
            return self._result
        with self._late_as_builtin():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the closure's error; returns None if it has a result. For arguments and errors see `result`."""
        if self._state is FINISHED:
            return self._exception
        with self._late_as_builtin():
            return super().exception(timeout)

    @contextlib.contextmanager
    def _late_as_builtin(self) -> Iterator[None]:
        try:
            yield
        # Before Python 3.11 this is another class than `TimeoutError`.
        except concurrent.futures.TimeoutError as error:
            if self._exception is error:
                raise
            raise TimeoutError from error

    @property
    def completed(self) -> int:
        """The number of runs with a result: 0 or 1, or more for `schedule(..., steps=)`."""
        return int(self._state is FINISHED and self._exception is None)

    def running(self) -> bool:
        """Returns whether a worker runs the closure now."""
        return self.is_started and not self.done()

    def cancel(self) -> bool:
        """Cancels the closure, also while a worker runs it.

        Returns:
          True if the closure is cancelled, False if it already has another outcome.
        """
        on_cancel = self.on_cancel
        return self.cancelled() if on_cancel is None else on_cancel() or self.cancelled()

    # The following methods are for the queue. For the base class, the future is still pending while a worker runs the
    # closure. The future can be cancelled until the queue decides the outcome, under the queue's lock. `on_cancel`
    # refers to the closure, which refers to the future. Setting the outcome breaks this reference cycle, so dropping
    # the future frees the result without a garbage collection.

    def set_result(self, result: Any) -> None:
        """Sets the closure's result."""
        self.on_cancel = None
        if not self._end_unwatched(FINISHED, result=result):
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets the error with which the closure ended."""
        self.on_cancel = None
        if not self._end_unwatched(FINISHED, exception=exception):
            super().set_exception(exception)

    def set_cancelled(self) -> None:
        """Records that the user cancelled the closure."""
        self.on_cancel = None
        if not self._end_unwatched(CANCELLED_AND_NOTIFIED):
            super().cancel()
            self.set_running_or_notify_cancel()

    def _end_unwatched(self, state: str, result: Any = None, exception: BaseException | None = None) -> bool:
        """If no condition exists, sets the outcome and calls the callbacks. Returns whether it has set the outcome."""
        with self._conditions_lock:
            is_unwatched = self._made_condition is None and self._state is PENDING
            if is_unwatched:
                self._result = result
                self._exception = exception
                self._state = state
        if is_unwatched and self._done_callbacks:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # of the base class
        return is_unwatched

    def result_or_none(self) -> Any:
        """Waits until the closure has ended. Returns the result, or None if the closure failed or was cancelled."""
        concurrent.futures.wait([self])
        return None if self.cancelled() or self.exception() is not None else self.result()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Calls `fn` with this future once it is done. An exception of `fn` is logged, not raised."""
        callback = functools.partial(_call_back, fn)
        with self._conditions_lock:
            is_unwatched = self._made_condition is None and self._state is PENDING
            if is_unwatched:
                self._done_callbacks = [*self._done_callbacks, callback]
        if not is_unwatched:
            super().add_done_callback(callback)

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
    """Calls `fn` so that `SystemExit` or `KeyboardInterrupt` in it cannot end a worker's thread.

    On the main thread `KeyboardInterrupt` comes from Ctrl-C, and is raised in the program.
    """
    try:
        fn(future)
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(f"A callback of {future} raised {type(error).__name__}, which is ignored.") from error
