r"""Where a closure waits until a worker may run it, and where its outcome is decided.

    schedule --put--> [ waiting, in order ] --take--> attempt --finish / fail--> outcome
                           ^                            |
                           \---------- requeue ---------/

Any worker takes an ordinary closure; one with a target is taken by that worker only, before the others. Internal
closures, which the library schedules for itself, are ignored by `wait_settled` and by the pending error.

Guarantees:
- First in, first out; a requeued closure goes to the front, and never waits for room.
- An outcome is decided once, and `wait_settled` returns only after all futures are set.
- The pending error is raised once, by whichever waiting call comes first, after everything has settled.
- A closure whose input has ended on a worker runs where it has not, and fails once that is nowhere.
- A worker that finds no closure sleeps until there is one that it may run; a closure wakes one worker.
- One lock. While it is held, only code of the core and of the standard library runs: no TensorFlow, no runtime, no user
  code (futures' callbacks, destructors of arguments).
"""

import threading
import time
from collections.abc import Callable, Sequence

from coordinator.errors import StrategyClosedError
from coordinator.events.event_stream import EventStream
from coordinator.queueing.closure import Attempt, Closure, ClosureState, ErrorScope, shared_cancellations
from coordinator.queueing.effects import Effects
from coordinator.queueing.interrupts import uninterrupted
from coordinator.queueing.queue_runs import QueueRuns
from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.queue_workers import QueueWorkers
from coordinator.queueing.quiet_periods import QuietPeriods
from coordinator.queueing.waiting import InterruptibleWaits, QueueWaits, deadline_after
from coordinator.runtime import Cancellation
from coordinator.statistics import ClusterStatistics


class ClosureQueue:
    """A queue of closures with back-pressure, retries, one pending error and cancellation.

    Args:
      capacity: `put` blocks while this many closures wait.
      new_cancellation: creates the cancellation of an attempt; called without the lock.
      report_stall: called with a report when a thread that waits sees no progress for `stall_interval`.
      stall_interval: in seconds.

    Attributes:
      workers: the workers that take closures from it.
      quiet, interruptible: the periods in which no scheduled closure runs; waits that may be given up.
      runs: closures with `steps`, divided into parts.
      events: what happens to closures is recorded there.
    """

    def __init__(
        self,
        capacity: int,
        new_cancellation: Callable[[], Cancellation],
        report_stall: Callable[[str], None],
        stall_interval: float,
    ) -> None:
        self.capacity = capacity
        self.events = EventStream()
        self._new_cancellation = new_cancellation
        # Of workers whose last `take` returned nothing: creating one may be expensive for the runtime.
        self._unused_cancellations: dict[int, Cancellation] = {}
        self._lock = threading.Lock()
        self._state = QueueState()
        self._waits = QueueWaits(self._lock, self._state, report_stall, stall_interval)
        self.workers = QueueWorkers(self._lock, self._state, self._unused_cancellations, self._carry_out)
        self.quiet = QuietPeriods(self._lock, self._state, self._waits)
        self.interruptible = InterruptibleWaits(self._lock, self._state, self._waits, capacity)
        self.runs = QueueRuns(self._lock, self._state, self._waits.has_room, self._state.wake, self.cancel)

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Adds a closure, waiting for room if the queue is full. An internal closure never waits.

        If it raises, the closure's future is cancelled.

        Args:
          closure: a new closure.
          timeout: in seconds; None for none.

        Raises:
          TimeoutError: there was no room in time.
          StrategyClosedError: the queue was stopped.
          BaseException: the pending error of an earlier closure, or the end of the closure's input on all workers.
        """
        state = self._state
        starved = None
        try:
            with self._lock:
                if closure.inputs:
                    self._waits.yield_to_workers(closure)
                is_starved = closure.inputs and state.waiting.inputs.why_starved(closure)
                if state.waiting.count >= self.capacity or state.error is not None or state.stopped or is_starved:
                    deadline = deadline_after(timeout)
                    starved = self._waits.wait_for_room(closure, self.capacity, deadline)
                if starved is None:
                    state.add(closure)
                    if state.idle:
                        state.wake(closure.target)
                else:
                    state.ends.pop(closure.inputs, None)
            if starved is not None:
                raise starved.new_error()
        except BaseException:
            # After Ctrl-C too, which may have come before a worker was woken for it.
            self.cancel(closure, closure.cancelled_error("it could not be scheduled: see what schedule raised"))
            raise

    @uninterrupted
    def unblock(self, closure: Closure) -> None:
        """Records that one of the results that a closure waits for exists."""
        with self._lock:
            if not closure.has_ended:
                self._state.unblock(closure)
                self._state.wake(closure.target)
            is_starved = closure.inputs and self._state.waiting.inputs.why_starved(closure)
        if is_starved:
            self.workers.fail_starved(closure.target)

    def take(self, worker: int, timeout: float | None = None) -> Attempt | None:
        """Waits for the next closure that `worker` may run, and starts an attempt.

        Args:
          worker: the worker's index. Only one thread may call this for a worker.
          timeout: in seconds; None for none.

        Returns:
          The attempt; None if none came in time, the worker was interrupted or dismissed, the queue is stopped, or a
          quiet period waits for the worker to report that it is idle.
        """
        cancellation = self._unused_cancellations.pop(worker, None) or self._new_cancellation()
        state, idle, is_late = self._state, None, False
        deadline = deadline_after(timeout)
        while True:
            with self._lock:
                if idle is not None:
                    state.idle.pop(worker, None)
                is_interrupted = idle is not None and idle.is_interrupted
                attempt = None if is_interrupted else state.start_next(worker, cancellation)
                if attempt is not None:
                    self._waits.has_room.notify(attempt.closure.future.runs)
                if idle is not None:
                    state.waking.pop(worker, None)
                    state.wake()
                    if state.quiet:
                        self._waits.notify_settled()
                is_over = is_late or is_interrupted or (state.quiet and worker in state.active)
                if attempt is not None or is_over or state.is_over_for(worker):
                    break
                # Also if another worker has taken what it was woken for.
                idle = state.wait(worker)
            is_late = not idle.wait(None if deadline is None else deadline - time.monotonic())
        if attempt is None:
            self._unused_cancellations[worker] = cancellation
        return attempt

    def take_batch(self, attempt: Attempt, limit: int, choose: Callable[[int], int]) -> list[Attempt]:
        """Takes closures from the front that may run in one call with a started attempt, without waiting.

        Args:
          attempt: was started just now.
          limit: the maximum number of attempts, this one included.
          choose: takes the number of attempts that are possible, returns how many to take. Called with the lock held.

        Returns:
          The attempts in order, `attempt` first. Each can be cancelled; their call is once all of them are.
        """
        state, closure = self._state, attempt.closure
        with self._lock:
            is_wanted = not (closure.has_ended or state.is_unwanted(closure) or state.is_over_for(attempt.worker))
            if not is_wanted or state.is_paused_or_quiet or closure.fusion_key is None:
                return [attempt]
            count = choose(1 + state.waiting.matching_ahead(closure, attempt.worker, limit - 1))
            if count == 1:
                return [attempt]
            self._waits.has_room.notify(count - 1)
            attempt.cancellation, *others = shared_cancellations(attempt.call_cancellation, count)
            attempts = [attempt]
            for cancellation in others:
                other = state.start_next(attempt.worker, cancellation, beside=closure)
                assert other is not None
                other.call_cancellation = attempt.call_cancellation
                attempts.append(other)
            return attempts

    def requeue(self, attempt: Attempt, reason: str = "") -> None:
        """Ends an attempt without an outcome; its closure waits at the front, unless it is not wanted any more."""
        with self._lock:
            effects = self._state.requeue(attempt, reason)
            self._state.wake(attempt.closure.target)
            is_over = self._state.is_over_for(attempt.worker)
        self._carry_out(effects)
        if is_over:
            # Perhaps only the worker that was removed had data left.
            self.workers.fail_starved(attempt.worker)

    def finish(self, attempts: Sequence[Attempt], results: Sequence[object]) -> None:
        """Records the results of a call; each decides its closure unless another attempt was earlier."""
        with self._lock:
            effects = self._state.finish(attempts, results)
        self._carry_out(effects, attempts)

    def fail(self, attempt: Attempt, error: BaseException, scope: ErrorScope) -> None:
        """Records an attempt's error, which is not to be retried, in the same way."""
        with self._lock:
            effects = self._state.decide(attempt, ClosureState.FAILED, error, scope)
        self._carry_out(effects, [attempt])

    @uninterrupted
    def fail_waiting(self, closure: Closure, error: BaseException, scope: ErrorScope) -> None:
        """Ends a closure that waits and can never run. Does nothing if it does not wait any more."""
        with self._lock:
            if closure.has_ended or closure.live:
                return
            effects = self._state.end(closure, ClosureState.FAILED, error, scope)
        self._carry_out(effects)

    def fail_all(self, error: BaseException, *, if_idle: bool) -> None:
        """Makes `error` the pending one, since no closure can run; `if_idle` even if there is no closure now."""
        with self._lock:
            effects = self._state.fail_all(error) if if_idle or not self._state.is_settled else Effects()
        self._carry_out(effects)

    @uninterrupted
    def cancel(self, closure: Closure, error: BaseException | None = None) -> bool:
        """Cancels a closure: its future raises `error`, or is cancelled. Returns False if its outcome is decided."""
        with self._lock:
            if closure.has_ended:
                return False
            effects = self._state.end(closure, ClosureState.CANCELLED, error)
        self._carry_out(effects)
        return True

    def cancel_all(self, timeout: float) -> list[Attempt]:
        """Cancels all scheduled closures, forgets pending errors, and waits at most `timeout` seconds for what runs.

        Returns:
          The attempts that still run, which nothing waits for any more.
        """
        cancelled = self._cancel_scheduled()
        with self._lock:
            # A schedule that waits to raise an error has none to raise any more.
            self._waits.notify_all()
            self._waits.wait_ended(cancelled, timeout)
            abandoned = self._state.abandon(cancelled)
            self._waits.notify_settled()
            return abandoned

    def wait_settled(self, timeout: float | None = None) -> None:
        """Waits until no closure waits or runs.

        Raises:
          TimeoutError: not in time; the message names what still runs.
          RuntimeError: the thread has begun a quiet period.
          BaseException: the pending error, once.
        """
        with self._lock:
            self._waits.wait_settled(deadline_after(timeout))

    def is_settled(self) -> bool:
        """Returns whether no closure waits or runs. Raises the pending error, once, when what ran has ended."""
        with self._lock:
            self._waits.raise_when_settled("done waits to raise an error", None)
            return self._state.is_settled

    def pause(self, reason: str) -> None:
        """Starts no closure until `resume`, and cancels what runs, which is then requeued."""
        with self._lock:
            self._state.paused = reason
            effects = Effects(cancelled=list(self._state.running))
        self._carry_out(effects)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not yet."""
        return bool(self._state.paused)

    def wait_idle(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until no attempt runs; returns whether none does."""
        with self._lock:
            return self._waits.wait_none_running(timeout)

    def resume(self) -> None:
        """Undoes `pause`."""
        with self._lock:
            self._state.paused = ""
            self._state.wake_all()

    @uninterrupted
    def stop(self) -> None:
        """Cancels everything, and makes every `take` return. May be called again."""
        with self._lock:
            effects = self._state.stop()
            for worker in list(self._state.idle):
                self._state.interrupt(worker)
            self._waits.notify_all()
        self._carry_out(effects)

    def refuse_stopped(self, what: str) -> None:
        """Raises StrategyClosedError if the queue was stopped; `what` says what is refused."""
        if self._state.stopped:
            raise StrategyClosedError(f"{what}: the strategy is closed.")

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._state.stopped

    def statistics(self) -> ClusterStatistics:
        """Returns the counts of all closures, without the workers'."""
        with self._lock:
            return self._state.statistics()

    def steps(self) -> int:
        """Returns how many runs of scheduled closures have finished: without those of the library itself."""
        return self._state.steps

    @uninterrupted
    def _cancel_scheduled(self) -> Sequence[Attempt]:
        with self._lock:
            effects = self._state.cancel_all()
        self._carry_out(effects)
        return effects.cancelled

    def _carry_out(self, effects: Effects, ended: Sequence[Attempt] = ()) -> None:
        """Sets futures and cancels attempts; only then are their closures settled, and the attempts `ended` over."""
        effects.record(self.events, ended)
        raised = None
        for closure, value in effects.outcomes:
            try:
                closure.report(value)
            except BaseException as error:  # noqa: BLE001 - of a callback; the other futures are set all the same
                raised = raised or error
        for attempt in effects.cancelled:
            if attempt not in ended:
                attempt.cancellation.cancel()
        with self._lock:
            for attempt in ended:
                self._state.end_attempt(attempt)
            for closure, _ in effects.outcomes:
                self._state.uncount(closure)
            if len(effects.outcomes) > len(ended):
                self._waits.has_room.notify_all()
            self._waits.notify_settled()
        for closure, _ in effects.outcomes:
            closure.release_work()
        if raised is not None:
            raise raised
