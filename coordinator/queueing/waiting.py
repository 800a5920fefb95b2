"""How a user's threads wait for the queue: for room, for all closures to settle, for running attempts to end.

Each wait has a deadline or is reported in the log when nothing progresses, and ends when the queue is stopped.
"""

import threading
import time
from collections.abc import Callable, Collection

from coordinator.errors import StrategyClosedError
from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.ended_inputs import Starved
from coordinator.queueing.queue_state import QueueState

# A loop over finite data schedules at full speed until this number of closures wait for each worker: two fused calls.
_AHEAD_PER_WORKER = 128
# In seconds.
_MOMENT = 0.01


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

        def is_starved() -> Starved | None:
            return state.waiting.inputs.why_starved(closure) if closure.inputs else None

        def may_proceed() -> bool:
            return state.stopped or state.error is not None or state.waiting.count < capacity or bool(is_starved())

        if not may_proceed():
            self._refuse_in_quiet(f"schedule would wait for room in the full queue for {closure}")
        while True:
            awaited = f"schedule waits for room for {closure} in the full queue"
            self._until(self.has_room, may_proceed, awaited, deadline)
            if state.stopped:
                raise StrategyClosedError(f"{closure} cannot be scheduled: the strategy is closed.")
            if state.error is None:
                return is_starved()
            self.raise_when_settled("schedule waits to raise an earlier error", deadline)

    def wait_settled(self, deadline: float | None, unless: Callable[[], bool] = lambda: False) -> None:
        """Waits until every closure has its outcome, and raises the pending error; gives up if `unless()`."""
        self._refuse_in_quiet("join was called")
        self._until(self._settled, lambda: self._state.is_settled or unless(), "join waits for closures", deadline)
        if not unless():
            self._raise_pending_error()

    def wait_room_or_error(self, capacity: int, deadline: float | None, unless: Callable[[], bool]) -> None:
        """Waits until fewer than `capacity` closures wait or an error can be raised; gives up if `unless()`."""
        state = self._state

        def is_over() -> bool:
            return state.stopped or state.error is not None or unless()

        awaited = "schedule waits for room in the full queue"
        self._until(self.has_room, lambda: is_over() or state.waiting.count < capacity, awaited, deadline)
        awaited = "schedule waits to raise an earlier error"
        self._until(self._settled, lambda: state.error is None or state.is_settled or unless(), awaited, deadline)
        # If it was given up, another thread may use the room.
        self.has_room.notify()

    def raise_when_settled(self, awaited: str, deadline: float | None) -> None:
        """If an error is pending, waits until what ran has ended, and raises the error unless another thread did."""
        state = self._state
        self._until(self._settled, lambda: state.error is None or state.is_settled, awaited, deadline)
        if state.is_settled:
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
