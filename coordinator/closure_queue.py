"""Where a closure waits until a worker may take it.

    schedule --put--> [ waiting, in order ] --take--> running --finish / fail / cancel--> settled
                           ^                            |
                           \\-------- hand_back ---------/

Any worker takes an ordinary closure; one with a target is taken by that worker alone, before the others, and is left
out of `wait_settled` and of the error below.

Promises:
- First in, first out; a closure handed back goes to the front and never waits for room.
- The first error of a closure withdraws all that waits, cancels all that runs, and is raised once: by the next `put`,
  `wait_settled` or `is_settled`, when everything that ran has ended. Then the queue is as new.
- A future is settled, and its callbacks have run, before its closure stops counting as running.
- One lock guards the state. Callbacks, cancellations, reports and destructors of arguments run without it.
"""

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from coordinator.closure import Closure, ClosureState
from coordinator.errors import StrategyClosedError
from coordinator.runtime import Cancellation
from coordinator.statistics import ClusterStatistics
from coordinator.watched_wait import WatchedWait


class ClosureQueue:
    """A queue of closures with back-pressure, retries, one pending error and cancellation.

    Args:
      capacity: `put` blocks while this many closures wait.
      new_cancellation: makes what cancels the closures that run, once per round between two errors.
      report_stall: called with words on what is awaited when a wait sees no progress for `stall_interval`.
      stall_interval: in seconds.
    """

    def __init__(
        self,
        capacity: int,
        new_cancellation: Callable[[], Cancellation],
        report_stall: Callable[[str], None],
        stall_interval: float,
    ) -> None:
        self._capacity = capacity
        self._new_cancellation = new_cancellation
        self._watched = WatchedWait(stall_interval, report_stall, self._progress, self._describe)
        self._lock = threading.Lock()
        self._may_take = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        # Ordered dictionaries, for a closure that is cancelled leaves from the middle of a line of any length.
        self._waiting: OrderedDict[Closure, None] = OrderedDict()
        self._targeted: dict[int, OrderedDict[Closure, None]] = {}
        self._running: dict[Closure, None] = {}
        self._running_targeted: dict[Closure, None] = {}
        self._cancellation = new_cancellation()
        self._targeted_cancellation = new_cancellation()
        self._error: BaseException | None = None
        self._stopped = False
        self._ended: Counter[ClosureState] = Counter()
        self._retried = 0

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Adds a closure, waiting for room if the queue is full.

        Raises:
          TimeoutError: there was no room in time. The closure's future is cancelled.
          StrategyClosedError: the queue was stopped.
          BaseException: the pending error of an earlier closure. The closure's future is cancelled.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        admitted = False
        try:
            with self._lock:
                self._wait_admission(closure, deadline)
                admitted = True
                self._waiting[closure] = None
                self._may_take.notify()
        except BaseException:
            if not admitted:
                self._withdraw([closure], "it could not be scheduled: see what schedule raised")
            raise

    def put_targeted(self, closure: Closure) -> None:
        """Adds a closure for its target alone; never waits. Its failure is told by its future alone.

        Raises:
          StrategyClosedError: the queue was stopped.
        """
        assert closure.target is not None
        with self._lock:
            if self._stopped:
                raise StrategyClosedError(f"{closure} cannot be scheduled: the strategy is closed.")
            self._line_of(closure)[closure] = None
            self._may_take.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def take(self, worker: int, timeout: float | None = None) -> Closure | None:
        """Waits for the next closure that `worker` may run, and starts it.

        Args:
          worker: the index of the worker that asks.
          timeout: in seconds; None for none.

        Returns:
          The closure; None if none came in time, or the queue is stopped.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while not (self._stopped or self._waiting or self._targeted.get(worker)):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._may_take.wait(None if timeout is None else left)
                if self._stopped:
                    return None
                closure = self._start_next(worker)
            if closure.state is ClosureState.RUNNING:
                return closure
            self._end([closure], ClosureState.CANCELLED)

    def hand_back(self, closure: Closure) -> None:
        """Puts a closure that runs back to the front, or withdraws it if it is no longer wanted."""
        with self._lock:
            unwanted = self._stopped or (self._error is not None and closure.target is None)
            if not unwanted:
                closure.hand_back()
                self._retried += 1
                self._forget_running([closure])
                line = self._line_of(closure)
                line[closure] = None
                line.move_to_end(closure, last=False)
                self._may_take.notify_all()
        if unwanted:
            self.cancel(closure)

    def finish(self, closure: Closure, result: object) -> None:
        """A closure that runs gave its result."""
        closure.future.set_result(result)
        self._end([closure], ClosureState.DONE)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """A closure that runs ended with an error, which becomes the pending one unless there is one already."""
        settle = self._begin_error(error) if closure.target is None else None
        closure.future.set_exception(error)
        if settle is not None:
            settle()
        self._end([closure], ClosureState.FAILED)

    def cancel(self, closure: Closure) -> None:
        """A closure that runs was stopped by its cancellation."""
        reason = "the strategy was closed" if self._stopped else "another closure failed while it ran"
        closure.future.set_exception(closure.withdrawal(reason))
        self._end([closure], ClosureState.CANCELLED)

    def fail_waiting(self, error: BaseException) -> None:
        """Makes `error` the pending one if closures wait, for none of them can be run."""
        with self._lock:
            hopeless = bool(self._waiting)
        settle = self._begin_error(error) if hopeless else None
        if settle is not None:
            settle()

    def discard(self, closure: Closure) -> None:
        """Takes out a closure that waits, because its future was cancelled. Does nothing if it waits no more."""
        with self._lock:
            line = self._line_of(closure)
            if closure not in line:
                return
            del line[closure]
            self._hold([closure])
            self._has_room.notify()
        closure.future.set_running_or_notify_cancel()
        self._end([closure], ClosureState.CANCELLED)

    def wait_settled(self, timeout: float | None = None) -> None:
        """Waits until nothing waits or runs.

        Raises:
          TimeoutError: not in time; says what still runs.
          BaseException: the pending error, once.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._watched.until(self._settled, self._is_empty, "join waits for closures", deadline)
            self._raise_pending_error()

    def is_settled(self) -> bool:
        """Whether nothing waits or runs. Raises the pending error, once, when what ran has ended."""
        with self._lock:
            self._watched.until(self._settled, self._may_raise, "done waits to raise an error", None)
            self._raise_pending_error()
            return self._is_empty()

    def stop(self) -> None:
        """Withdraws all that waits, cancels all that runs, and sends the workers home. May be called again."""
        with self._lock:
            self._stopped = True
            withdrawn = [*self._waiting, *(closure for line in self._targeted.values() for closure in line)]
            self._waiting.clear()
            self._targeted.clear()
            self._hold(withdrawn)
            for condition in (self._may_take, self._has_room, self._settled):
                condition.notify_all()
        self._withdraw(withdrawn, "the strategy was closed")
        self._cancellation.cancel()
        self._targeted_cancellation.cancel()

    def statistics(self) -> ClusterStatistics:
        """The counts, without the workers'."""
        with self._lock:
            return ClusterStatistics(
                waiting=len(self._waiting),
                running=len(self._running),
                finished=self._ended[ClosureState.DONE],
                failed=self._ended[ClosureState.FAILED],
                cancelled=self._ended[ClosureState.CANCELLED],
                retried=self._retried,
            )

    def __repr__(self) -> str:
        return f"<ClosureQueue: {self.statistics()}>"

    # What follows is called with the lock held, but for `_begin_error`, `_withdraw` and `_end`.

    def _wait_admission(self, closure: Closure, deadline: float | None) -> None:
        while True:
            self._watched.until(
                self._has_room,
                lambda: self._stopped or self._error is not None or len(self._waiting) < self._capacity,
                f"schedule waits for room for {closure} in the full queue",
                deadline,
            )
            if self._stopped:
                raise StrategyClosedError(f"{closure} cannot be scheduled: the strategy is closed.")
            if self._error is None:
                return
            self._watched.until(self._settled, self._may_raise, "schedule waits to raise an earlier error", deadline)
            self._raise_pending_error()

    def _line_of(self, closure: Closure) -> OrderedDict[Closure, None]:
        return self._waiting if closure.target is None else self._targeted.setdefault(closure.target, OrderedDict())

    def _is_empty(self) -> bool:
        return not self._waiting and not self._running

    def _may_raise(self) -> bool:
        """Whether nobody needs to wait to raise the error: what ran has ended, or another thread raised it."""
        return self._error is None or self._is_empty()

    def _start_next(self, worker: int) -> Closure:
        """Takes the next closure out and starts it, unless its future was cancelled and `discard` is yet to come."""
        closure, _ = (self._targeted.get(worker) or self._waiting).popitem(last=False)
        self._has_room.notify()
        self._hold([closure])
        # The first attempt makes the future uncancellable.
        if closure.attempts > 0 or closure.future.set_running_or_notify_cancel():
            closure.start(worker, self._cancellation if closure.target is None else self._targeted_cancellation)
        return closure

    def _hold(self, closures: Iterable[Closure]) -> None:
        """Counts closures as running until their futures are told, so that a join under way waits for that."""
        for closure in closures:
            (self._running if closure.target is None else self._running_targeted)[closure] = None

    def _forget_running(self, closures: Iterable[Closure]) -> None:
        for closure in closures:
            (self._running if closure.target is None else self._running_targeted).pop(closure, None)

    def _raise_pending_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin_error(self, error: BaseException) -> Callable[[], None] | None:
        """Makes `error` pending, if it is the first; returns what withdraws and cancels the rest."""
        fresh = self._new_cancellation()
        with self._lock:
            if self._error is not None or self._stopped:
                return None
            self._error = error
            cancellation, self._cancellation = self._cancellation, fresh
            withdrawn = list(self._waiting)
            self._waiting.clear()
            self._hold(withdrawn)
            self._has_room.notify_all()

        def settle() -> None:
            self._withdraw(withdrawn, f"another closure failed ({type(error).__name__})")
            cancellation.cancel()

        return settle

    def _withdraw(self, closures: list[Closure], reason: str) -> None:
        for closure in closures:
            if closure.future.running() or closure.future.set_running_or_notify_cancel():
                closure.future.set_exception(closure.withdrawal(reason))
        self._end(closures, ClosureState.CANCELLED)

    def _end(self, closures: list[Closure], state: ClosureState) -> None:
        """Closures whose futures have been told stop counting as running."""
        with self._lock:
            for closure in closures:
                closure.end(state)
            self._ended[state] += len(closures)
            self._forget_running(closures)
            if self._is_empty():
                self._settled.notify_all()
        for closure in closures:
            closure.let_go()

    def _progress(self) -> tuple[int, ...]:
        return (*self._ended.values(), self._retried)

    def _describe(self) -> str:
        now = time.monotonic()
        shown = [
            f"{closure} on worker {closure.worker} for {now - closure.started:.1f} s (attempt {closure.attempts})"
            for closure in list(self._running)[:10]
            if closure.state is ClosureState.RUNNING
        ]
        more = len(self._running) - len(shown)
        running = ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "nothing"
        return f"{len(self._waiting)} closures wait, running: {running}"
