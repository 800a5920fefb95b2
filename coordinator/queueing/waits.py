"""How a user's threads wait for the queue: for room, for all closures to settle, for running attempts to end.

Each wait has a deadline or is reported in the log when nothing progresses, and ends when the queue is stopped.

Changes of the queue that Ctrl-C does not cut in two.

Python raises `KeyboardInterrupt` between any two operations of the main thread. Half a change would be left for ever: a
closure that is counted and never runs, a worker that is never woken. The workers' threads are not interrupted.
"""

import _signal  # type: ignore[import-not-found]
import functools
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import ParamSpec, TypeVar

from coordinator.errors import StrategyClosedError
from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.queue_state import QueueState, Starved

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


# A loop over finite data schedules at full speed until this number of closures wait for each worker: two fused calls.
_AHEAD_PER_WORKER = 128
# In seconds.
_MOMENT = 0.01
# What is awaited, for messages.
_FOR_ROOM = "schedule waits for room{} in the full queue"
_FOR_ERROR = "schedule waits to raise an earlier error"


class QueueWaits:
    """The conditions on which threads wait. All methods are called with the queue's lock held, and release it to wait.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      report_stall: called without the lock with a report when a wait sees no progress for `stall_interval`.
      stall_interval: in seconds.

    Attributes:
      has_room: to be notified when closures stop waiting.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        report_stall: Callable[[str], None],
        stall_interval: float,
    ) -> None:
        self.has_room = threading.Condition(lock)
        self._settled = threading.Condition(lock)
        self._attempt_ended = threading.Condition(lock)
        self._state = state
        self._report_stall = report_stall
        self._stall_interval = stall_interval

    def yield_to_workers(self, closure: Closure) -> None:
        """Waits a moment, or until a worker takes closures, if the closure's data may be finite and many closures wait.

        A loop that schedules until the data ends would otherwise hold the interpreter, which the workers' threads need,
        and schedule many closures in vain.
        """
        waiting = self._state.waiting
        many = _AHEAD_PER_WORKER * len(waiting.inputs.workers)
        if waiting.count > many and any(each.is_finite is not False for each in closure.inputs):
            self.has_room.wait(_MOMENT)
            # Another thread may have waited for room longer.
            self.has_room.notify()

    def wait_for_room(self, closure: Closure, capacity: int, deadline: float | None) -> Starved | None:
        """Waits until fewer than `capacity` closures wait, unless it is internal. Raises what `put` says.

        Returns:
          Why no worker can run the closure, if none can.
        """
        state = self._state
        if closure.is_internal and not state.stopped:
            return None

        def why_starved() -> Starved | None:
            return state.waiting.inputs.why_starved(closure) if closure.inputs else None

        may_proceed = functools.partial(self._may_proceed, capacity, lambda: why_starved() is not None)
        if not may_proceed():
            self._refuse_in_quiet(f"schedule would wait for room in the full queue for {closure}")
        while True:
            self._until(self.has_room, may_proceed, _FOR_ROOM.format(f" for {closure}"), deadline)
            if state.stopped:
                raise StrategyClosedError(f"{closure} cannot be scheduled: the strategy is closed.")
            if state.error is None:
                return why_starved()
            self.raise_when_settled(_FOR_ERROR, deadline)

    def wait_room_or_error(self, capacity: int, deadline: float | None, unless: Callable[[], bool]) -> None:
        """Waits until fewer than `capacity` closures wait or an error can be raised; gives up if `unless()`."""
        self._until(
            self.has_room, functools.partial(self._may_proceed, capacity, unless), _FOR_ROOM.format(""), deadline
        )
        self._until_error_settled(_FOR_ERROR, deadline, unless)
        # If it was given up, another thread may use the room.
        self.has_room.notify()

    def wait_settled(self, deadline: float | None, unless: Callable[[], bool] = lambda: False) -> None:
        """Waits until every closure has its outcome, and raises the pending error; gives up if `unless()`."""
        self._refuse_in_quiet("join was called")
        self._until(self._settled, lambda: self._state.is_settled or unless(), "join waits for closures", deadline)
        if not unless():
            self._raise_pending_error()

    def raise_when_settled(self, awaited: str, deadline: float | None) -> None:
        """If an error is pending, waits until what ran has ended, and raises the error unless another thread did."""
        self._until_error_settled(awaited, deadline)
        if self._state.is_settled:
            self._raise_pending_error()

    def wait_quiet(self, deadline: float | None) -> None:
        """Waits until no scheduled closure runs and all workers have reported that they are idle."""
        awaited = "strategy.quiet() waits for functions that run"
        self._until(self._attempt_ended, lambda: self._state.stopped or self._state.is_quiet, awaited, deadline)

    def wait_none_running(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until no attempt runs; returns whether none does."""
        return self._attempt_ended.wait_for(lambda: not self._state.running, timeout)

    def wait_ended(self, attempts: Collection[Attempt], timeout: float) -> None:
        """Waits at most `timeout` seconds until none of these attempts runs."""
        self._attempt_ended.wait_for(lambda: self._state.running.keys().isdisjoint(attempts), timeout)

    def notify_settled(self) -> None:
        """Notifies the threads that wait for what has become true."""
        if self._state.is_settled:
            self._settled.notify_all()
        self._attempt_ended.notify_all()

    def notify_all(self) -> None:
        """Notifies all threads."""
        for condition in (self.has_room, self._settled, self._attempt_ended):
            condition.notify_all()

    def _refuse_in_quiet(self, what: str) -> None:
        """Raises RuntimeError on a thread that has begun a quiet period; `what` would wait for its end."""
        if threading.current_thread() in self._state.quiet.values():
            raise RuntimeError(
                f"{what} inside `with strategy.quiet():`, where no scheduled function runs; it would wait for ever. "
                "Call it after the block."
            )

    def _may_proceed(self, capacity: int, unless: Callable[[], bool]) -> bool:
        """Returns whether `schedule` need not wait for room: there is some, it would raise an error, or `unless()`."""
        state = self._state
        return state.stopped or state.error is not None or state.waiting.count < capacity or unless()

    def _until_error_settled(
        self, awaited: str, deadline: float | None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """If an error is pending, waits until what ran has ended; gives up if `unless()`."""
        state = self._state
        self._until(self._settled, lambda: state.error is None or state.is_settled or unless(), awaited, deadline)

    def _raise_pending_error(self) -> None:
        error = self._state.take_error()
        if error is not None:
            raise error

    def _until(
        self, condition: threading.Condition, is_true: Callable[[], bool], awaited: str, deadline: float | None
    ) -> None:
        """Waits until `is_true()`; raises TimeoutError at `deadline`, on the `time.monotonic` clock."""
        start = time.monotonic()
        progress = self._state.progress
        while not is_true():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"Timed out after {now - start:.1f} s: {awaited}; {_description(self._state)}.")
            interval = self._stall_interval if deadline is None else min(self._stall_interval, deadline - now)
            was_notified = condition.wait(interval)
            if not was_notified and interval == self._stall_interval and progress == self._state.progress:
                waited = time.monotonic() - start
                report = f"No progress for {waited:.0f} s: {awaited}; {_description(self._state)}."
                condition.release()
                try:
                    self._report_stall(report)
                finally:
                    condition.acquire()
            progress = self._state.progress


class InterruptibleWaits:
    """Waits that end early when a condition of the caller becomes true, after `wake`.

    A thread of the library makes them in place of the user's thread, which runs a function of TensorFlow meanwhile.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      waits: how threads wait for it.
      capacity: the number of closures that may wait.
    """

    def __init__(self, lock: threading.Lock, state: QueueState, waits: QueueWaits, capacity: int) -> None:
        self._lock = lock
        self._state = state
        self._waits = waits
        self._capacity = capacity

    @property
    def is_free(self) -> bool:
        """Whether `put` would not wait now, and `wait_settled` would not raise."""
        return self._state.error is None and self._state.waiting.count < self._capacity

    def wait_for_room(self, timeout: float | None, unless: Callable[[], bool]) -> None:
        """Waits until `put` would not wait; raises TimeoutError."""
        with self._lock:
            self._waits.wait_room_or_error(self._capacity, deadline_after(timeout), unless)

    def wait_settled(self, timeout: float | None, unless: Callable[[], bool]) -> None:
        """Does what `ClosureQueue.wait_settled` does; raises no pending error once `unless()` is true."""
        with self._lock:
            self._waits.wait_settled(deadline_after(timeout), unless)

    def wake(self) -> None:
        """Has each wait look at its condition."""
        with self._lock:
            self._waits.notify_all()


def deadline_after(timeout: float | None) -> float | None:
    """Returns the end of a time in seconds on the `time.monotonic` clock; None for a time without an end."""
    return None if timeout is None else time.monotonic() + timeout


def _description(state: QueueState) -> str:
    """Returns what waits and runs, for messages."""
    now = time.monotonic()
    shown = [
        f"{attempt.closure} on worker {attempt.worker} for {now - attempt.started:.1f} s (attempt {attempt.number})"
        for attempt in list(state.running)[:10]
    ]
    more = len(state.running) - len(shown)
    running = ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "nothing"
    quiet = "".join(f"strategy.quiet() was entered in {thread.name}" for thread in [*state.quiet.values()][:1])
    paused = f"; no closure is started because {state.paused or quiet}" if state.is_paused_or_quiet else ""
    return f"{state.waiting.count} closures wait, running: {running}{paused}"
