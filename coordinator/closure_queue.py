"""Where a closure waits until a worker may take it.

    schedule --put--> [ waiting, in order ] --take--> attempt --finish / fail--> settled
                           ^                            |
                           \\-------- hand_back ---------/

Any worker takes an ordinary closure; one with a target is taken by that worker alone, before the others. The library's
own closures are left out of `wait_settled` and of the error below.

Promises: first in, first out; a closure handed back goes to the front and never waits for room. What happens at the
end, `ClosureOutcomes` promises. A worker with nothing to take sleeps until somebody has a closure that it may run; a
closure wakes one worker, however many there are, and that one wakes with it.
"""

import time
from collections.abc import Callable
from typing import Any

from coordinator.closure_outcomes import ClosureOutcomes
from coordinator.queueing.closure import Attempt, Closure, ClosureState
from coordinator.queueing.idle_workers import IdleWorker
from coordinator.runtime import Cancellation
from coordinator.shared_cancellation import SharedCancellation


class ClosureQueue(ClosureOutcomes):
    """A queue of closures with back-pressure, retries, one pending error and cancellation.

    Args:
      capacity: `put` blocks while this many closures wait.
      new_cancellation: makes what cancels an attempt.
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
        super().__init__(report_stall, stall_interval)
        self._capacity = capacity
        self._new_cancellation = new_cancellation
        # Of workers that took nothing with theirs. Making one may be work for the runtime.
        self._unused_cancellations: dict[int, Cancellation] = {}

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Adds a closure that `wait_settled` heeds, waiting for room if the queue is full.

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
                self._state.admit(closure)
                self._offer(closure)
        except BaseException:
            if not admitted:
                self._claim(closure, ClosureState.CANCELLED)
                self._tell_withdrawn([closure], "it could not be scheduled: see what schedule raised")
            raise

    def put_internal(self, closure: Closure) -> None:
        """Adds a closure of the library's own; never waits. Its failure is told by its future alone.

        Raises:
          StrategyClosedError: the queue was stopped.
        """
        assert closure.is_internal
        with self._lock:
            self.refuse_stopped(f"{closure} cannot be scheduled")
            self._state.admit(closure)
            self._offer(closure)

    def unblock(self, closure: Closure) -> None:
        """One of the results that a closure waits for is there."""
        with self._lock:
            if not closure.has_ended:
                self._state.lines.discard(closure)
                closure.unblock()
                self._state.lines.append(closure)
                self._offer(closure)

    def take(self, worker: int, timeout: float | None = None) -> Attempt | None:
        """Waits for the next closure that `worker` may run, and starts an attempt.

        Args:
          worker: the index of the worker that asks; one thread asks for it at a time.
          timeout: in seconds; None for none.

        Returns:
          The attempt; None if no closure came in time, the worker was roused or dismissed, or the queue is stopped.
        """
        cancellation = self._unused_cancellations.pop(worker, None) or self._new_cancellation()
        with self._lock:
            if self._state.may_take(worker):
                return self._start_next(worker, cancellation)
            if self._state.is_over_for(worker):
                return None
            idle = self._idle.add(worker, cancellation)
        was_woken = idle.wait(timeout)
        with self._lock:
            self._idle.leave(idle)
            attempt = idle.attempt
            if attempt is None and not was_woken and self._state.may_take(worker):
                # It waits because enough others are being woken already.
                attempt = self._start_next(worker, cancellation)
            self._hand_out()
        if attempt is None:
            self._unused_cancellations[worker] = cancellation
        return attempt

    @property
    def waiting_for_all(self) -> int:
        """How many closures wait for whichever worker is free, as of a moment ago."""
        return self._state.lines.for_all

    def take_alike(
        self, attempt: Attempt, limit: int, is_alike: Callable[[Any], bool], choose: Callable[[int], int]
    ) -> list[Attempt]:
        """Takes, without waiting, closures at the front of the common line that may run in one call with `attempt`.

        Args:
          attempt: under way already, and not told to anybody who could cancel its call.
          limit: the most attempts that there may be, that one included.
          is_alike: tells of the work of a closure whether it may. Called with the lock held.
          choose: takes how many attempts there could be, at most `limit`; returns how many there are to be. Likewise.

        Returns:
          The attempts in order, `attempt` first. They can be cancelled each for itself; their call, when all are.
        """
        state = self._state
        with self._lock:
            if state.is_over_for(attempt.worker) or state.held or state.is_unwanted(attempt.closure):
                return [attempt]
            if attempt.closure.has_ended:
                return [attempt]
            count = choose(1 + state.lines.alike_ahead(is_alike, limit - 1))
            if count == 1:
                return [attempt]
            self._has_room.notify(count - 1)
            return state.start_with(attempt, SharedCancellation(attempt.call_cancellation, count).shares)

    def hand_back(self, attempt: Attempt) -> bool:
        """An attempt ended without an outcome: its closure goes back to the front, unless that is not wanted any more.

        Returns:
          Whether the closure will be tried again because of this.
        """
        closure = attempt.closure
        with self._lock:
            self._leave(attempt)
            if closure.has_ended or closure.live:
                return False
            again = not self._state.is_unwanted(closure)
            if again:
                self._state.put_back(closure)
                self._offer(closure)
            else:
                self._state.decide(closure, ClosureState.CANCELLED)
        if not again:
            stopped = self._state.stopped
            self._tell_withdrawn(
                [closure], "the strategy was closed" if stopped else "another closure failed while it ran"
            )
        return again

    def try_overrun_elsewhere(self) -> None:
        """Puts each closure whose latest attempt has overrun its time to the front, to be tried beside that one."""
        with self._lock:
            for closure in self._state.overrun():
                self._state.lines.push_front(closure)
                self._offer(closure)

    def waiting_for(self, worker: int) -> list[Closure]:
        """The closures that wait for this worker alone."""
        with self._lock:
            return self._state.lines.of_worker(worker)

    def dismiss(self, worker: int) -> None:
        """Lets `worker` take nothing any more."""
        with self._lock:
            self._state.dismissed.add(worker)
            self._idle.send_away(worker)
        self._unused_cancellations.pop(worker, None)

    def admit_worker(self, worker: int) -> None:
        """Undoes `dismiss`."""
        with self._lock:
            self._state.dismissed.discard(worker)

    def idle_workers(self) -> list[int]:
        """The workers that wait in `take`, longest first."""
        with self._lock:
            return self._idle.indices()

    def rouse(self, worker: int) -> None:
        """Has `take` return with nothing, if `worker` waits in it: there is something else for it to do."""
        with self._lock:
            self._idle.send_away(worker)

    def cancel_attempts_on(self, worker: int) -> None:
        """Cancels what `worker` runs; it is handed back."""
        with self._lock:
            attempts = [attempt for attempt in self._state.running if attempt.worker == worker]
        self._cancel(attempts)

    def hold(self, reason: str) -> None:
        """Lets nobody take anything until `release`, and cancels what runs; it is handed back."""
        with self._lock:
            self._state.held = reason
            attempts = list(self._state.running)
        self._cancel(attempts)

    def wait_quiet(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until no attempt is under way; whether none is."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._state.running, timeout)

    def release(self) -> None:
        """Undoes `hold`."""
        with self._lock:
            self._state.held = ""
            for worker in self._idle.indices():
                if self._state.lines.of_worker(worker):
                    self._hand_next(self._idle.pop(worker))
            self._hand_out()

    # With the lock held:

    def _wait_admission(self, closure: Closure, deadline: float | None) -> None:
        state = self._state
        while state.stopped or state.error is not None or len(state.lines) >= self._capacity:
            self._watched.until(
                self._has_room,
                lambda: state.stopped or state.error is not None or len(state.lines) < self._capacity,
                f"schedule waits for room for {closure} in the full queue",
                deadline,
            )
            self.refuse_stopped(f"{closure} cannot be scheduled")
            if state.error is not None:
                self._watched.until(
                    self._settled, self._may_raise, "schedule waits to raise an earlier error", deadline
                )
                self._raise_pending_error()

    def _start_next(self, worker: int, cancellation: Cancellation) -> Attempt:
        self._has_room.notify()
        return self._state.start_next(worker, cancellation)

    def _offer(self, closure: Closure) -> None:
        """A closure came into a line: hands it to a worker that may run it, if one is idle."""
        if closure.target is None:
            self._hand_out()
        elif not self._state.held and closure.state is not ClosureState.BLOCKED:
            self._hand_next(self._idle.pop(closure.target))

    def _hand_out(self) -> None:
        """Hands what any worker may run to those that are idle, as many as may be woken now."""
        while self._state.may_hand_out and (idle := self._idle.pop_longest()):
            self._hand_next(idle)

    def _hand_next(self, idle: IdleWorker | None) -> None:
        if idle is not None:
            idle.wake(self._start_next(idle.index, idle.cancellation))
