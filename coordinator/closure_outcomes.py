"""How closures come to their outcome, and how that is told: to futures, to `join`, to other closures.

    attempt --finish, fail--> decided --> future told --> counts no more --> join returns, or raises
    user    --discard-------/
    error   --withdraws all others

Promises:
- A closure has one outcome: that of the first attempt that comes to one. What other attempts bring is dropped.
- The first error of a closure withdraws all that waits, cancels all that runs, and is raised once: by the next `put`,
  `wait_settled` or `is_settled`, when everything that ran has ended. Then all is as new. An error of lesser `Reach`
  leaves the others alone.
- A future is settled, and its callbacks have run, before its closure stops counting as running.
- One lock guards the state. Callbacks, cancellations, reports and destructors of arguments run without it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from coordinator.errors import StrategyClosedError
from coordinator.queue_state import QueueState
from coordinator.queueing.closure import Attempt, Closure, ClosureState
from coordinator.queueing.idle_workers import IdleWorkers
from coordinator.statistics import ClusterStatistics
from coordinator.watched_wait import WatchedWait
from coordinator.workers.retry_rule import Reach


class ClosureOutcomes:
    """Decides, tells and counts the outcomes of closures; the part of `ClosureQueue` that comes after the lines.

    Args:
      report_stall: called with words on what is awaited when a wait sees no progress for `stall_interval`.
      stall_interval: in seconds.
    """

    def __init__(self, report_stall: Callable[[str], None], stall_interval: float) -> None:
        self._state = QueueState()
        self._watched = WatchedWait(stall_interval, report_stall, lambda: self._state.progress, self._state.describe)
        self._lock = threading.Lock()
        self._idle = IdleWorkers()
        self._has_room = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)

    def finish(self, attempt: Attempt, result: object) -> bool:
        """An attempt gave a result; whether it is the closure's outcome."""
        rivals = self._claim(attempt.closure, ClosureState.DONE)
        if rivals is not None:
            attempt.closure.future.tell_result(result)
            self._cancel(rivals, sparing=attempt)
        self._end_attempt(attempt)
        return rivals is not None

    def fail(self, attempt: Attempt, error: BaseException, reach: Reach) -> bool:
        """An attempt ended with an error that is not to be tried again; whether it is the closure's outcome."""
        rivals = self._claim(attempt.closure, ClosureState.FAILED)
        if rivals is not None:
            self._tell_failed(attempt.closure, error, reach)
            self._cancel(rivals, sparing=attempt)
        self._end_attempt(attempt)
        return rivals is not None

    def fail_waiting(self, closure: Closure, error: BaseException, reach: Reach) -> None:
        """Ends a closure that waits and can never run. Does nothing if it waits no more."""
        if self._claim(closure, ClosureState.FAILED, if_waiting=True) is not None:
            self._tell_failed(closure, error, reach)
            self._settle([closure])

    def fail_all(self, error: BaseException, *, if_idle: bool) -> None:
        """Makes `error` the pending one, for nothing can be run; `if_idle` even if there is nothing to run now."""
        if if_idle or not self._state.is_settled:
            self._begin_error(error)()

    def discard(self, closure: Closure) -> bool:
        """Withdraws a closure, or cancels its attempts, as its user asked; False if its outcome is decided."""
        attempts = self._claim(closure, ClosureState.CANCELLED)
        if attempts is None:
            return False
        closure.future.tell_cancelled()
        self._cancel(attempts)
        self._settle([closure])
        return True

    def wait_settled(self, timeout: float | None = None) -> None:
        """Waits until nothing waits or runs.

        Raises:
          TimeoutError: not in time; says what still runs.
          BaseException: the pending error, once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._watched.until(self._settled, lambda: self._state.is_settled, "join waits for closures", deadline)
            self._raise_pending_error()

    def is_settled(self) -> bool:
        """Whether nothing waits or runs. Raises the pending error, once, when what ran has ended."""
        with self._lock:
            self._watched.until(self._settled, self._may_raise, "done waits to raise an error", None)
            if self._state.is_settled:
                self._raise_pending_error()
            return self._state.is_settled

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._state.stopped

    def refuse_stopped(self, what: str) -> None:
        """Raises StrategyClosedError, with words on what is refused, if the queue was stopped."""
        if self._state.stopped:
            raise StrategyClosedError(f"{what}: the strategy is closed.")

    def stop(self) -> None:
        """Withdraws all that waits, cancels all that runs, and sends the workers home. May be called again."""
        with self._lock:
            self._state.stopped = True
            withdrawn = self._state.withdraw(lambda _: True)
            attempts = list(self._state.running)
            for worker in self._idle.indices():
                self._idle.send_away(worker)
            for condition in (self._has_room, self._settled, self._quiet):
                condition.notify_all()
        self._tell_withdrawn(withdrawn, "the strategy was closed")
        self._cancel(attempts)

    def statistics(self) -> ClusterStatistics:
        """The counts, without the workers'."""
        with self._lock:
            return self._state.statistics()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.statistics()}>"

    # With the lock held:

    def _may_raise(self) -> bool:
        """Whether nobody needs to wait to raise the error: what ran has ended, or another thread raised it."""
        return self._state.error is None or self._state.is_settled

    def _raise_pending_error(self) -> None:
        error = self._state.take_error()
        if error is not None:
            raise error

    def _leave(self, attempt: Attempt) -> None:
        self._state.leave(attempt)
        self._notify_settled()

    def _notify_settled(self) -> None:
        if self._state.is_settled:
            self._settled.notify_all()
        if not self._state.running:
            self._quiet.notify_all()

    # Without the lock:

    def _claim(self, closure: Closure, state: ClosureState, if_waiting: bool = False) -> tuple[Attempt, ...] | None:
        """Decides a closure's outcome, for the first that asks; its attempts, or None for whoever comes later."""
        with self._lock:
            if closure.has_ended or (if_waiting and closure.live):
                return None
            if self._state.decide(closure, state):
                self._has_room.notify()
            return closure.live

    def _end_attempt(self, attempt: Attempt) -> None:
        with self._lock:
            self._leave(attempt)
        attempt.closure.let_go()

    def _settle(self, closures: Iterable[Closure]) -> None:
        """Closures whose futures were told stop counting."""
        with self._lock:
            for closure in closures:
                self._state.uncount(closure)
            self._notify_settled()
        for closure in closures:
            closure.let_go()

    def _cancel(self, attempts: Iterable[Attempt], sparing: Attempt | None = None) -> None:
        for attempt in attempts:
            if attempt is not sparing:
                attempt.cancellation.cancel()

    def _tell_failed(self, closure: Closure, error: BaseException, reach: Reach) -> None:
        # The error is pending before its future tells of it, and the others learn of it afterwards.
        spread = self._raise_later(closure, error, reach)
        closure.future.tell_error(error)
        spread()

    def _raise_later(self, closure: Closure, error: BaseException, reach: Reach) -> Callable[[], None]:
        """Makes an error of `closure` pending as far as it reaches; returns what withdraws and cancels the rest."""
        if closure.is_internal or reach is Reach.FUTURE:
            return lambda: None
        if reach is Reach.EVERYTHING:
            return self._begin_error(error)
        with self._lock:
            self._state.late_error = self._state.late_error or error
        return lambda: None

    def _begin_error(self, error: BaseException) -> Callable[[], None]:
        """Makes `error` pending, if it is the first; returns what withdraws and cancels the rest."""
        with self._lock:
            if self._state.error is not None or self._state.stopped:
                return lambda: None
            self._state.error = error
            withdrawn = self._state.withdraw(lambda closure: not closure.is_internal)
            attempts = [attempt for attempt in self._state.running if not attempt.closure.is_internal]
            self._has_room.notify_all()

        def settle() -> None:
            self._tell_withdrawn(withdrawn, f"another closure failed ({type(error).__name__})")
            self._cancel(attempts)

        return settle

    def _tell_withdrawn(self, closures: Sequence[Closure], reason: str) -> None:
        for closure in closures:
            closure.future.tell_error(closure.withdrawal(reason))
        self._settle(closures)
