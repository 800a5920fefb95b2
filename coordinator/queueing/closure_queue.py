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

Periods in which no scheduled closure runs, so that what the client reads and saves meanwhile is of one moment.

    begin: no scheduled closure starts --> each worker ends what it runs, and reports that it is idle --> the block
    end:   closures start again, unless another period goes on

Guarantees:
- Inside the block no scheduled closure runs, and no worker reports that it is idle. Internal closures may run, and
  calls that were cancelled and did not end: the log names them.
- Workers report that they are idle as soon as they have ended what they run. So one that waits for the others in the
  middle of a closure, at the gate of an update rule, goes on instead of waiting for the end of the period.
- However the wait or the block ends, closures start again.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coordinator.errors import StrategyClosedError
from coordinator.events.event_stream import EventStream
from coordinator.queueing.closure import (
    Attempt,
    Closure,
    ClosureState,
    Effects,
    ErrorScope,
    RunsFuture,
    available,
    number,
    shared_cancellations,
)
from coordinator.queueing.queue_state import Apart, QueueState
from coordinator.queueing.waits import InterruptibleWaits, QueueWaits, deadline_after, uninterrupted
from coordinator.runtime import Cancellation, Failure, FailureKind, FiniteInput
from coordinator.statistics import ClusterStatistics, WorkerCounts

_logger = logging.getLogger("coordinator")


class QuietPeriods:
    """The quiet periods of a closure queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      waits: wait for the queue.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        waits: QueueWaits,
    ) -> None:
        self._lock = lock
        self._state = state
        self._waits = waits

    @contextlib.contextmanager
    def period(self, timeout: float | None) -> Iterator[None]:
        """A scope in which no scheduled closure runs.

        Args:
          timeout: how long to wait for what runs when it begins, in seconds; None for no limit.

        Raises:
          TimeoutError: something still ran then; the message says what.
          StrategyClosedError: the queue was stopped.
        """
        deadline = deadline_after(timeout)
        period = object()
        try:
            self._begin(period)
            with self._lock:
                self._waits.wait_quiet(deadline)
                if self._state.stopped:
                    raise StrategyClosedError("A quiet period cannot begin: the strategy is closed.")
                abandoned = [*self._state.abandoned]
            for attempt in abandoned:
                _logger.warning(
                    "strategy.quiet() does not wait for the call of %s on worker %d, which was cancelled and does not "
                    "end; what it still writes may come in between.",
                    attempt.closure,
                    attempt.worker,
                )
            yield
        finally:
            self._end(period)

    def is_active(self, worker: int) -> bool:
        """Returns whether a worker has had a scheduled closure since it last reported that it is idle."""
        return worker in self._state.active

    def report_idle(self, worker: int) -> None:
        """Records that a worker has reported, to all who want to know, that it is idle."""
        with self._lock:
            self._state.active.discard(worker)
            self._waits.notify_settled()

    @uninterrupted
    def _begin(self, period: object) -> None:
        with self._lock:
            self._state.quiet[period] = threading.current_thread()
            for worker in self._state.active:
                self._state.interrupt(worker)

    @uninterrupted
    def _end(self, period: object) -> None:
        with self._lock:
            self._state.quiet.pop(period, None)
            if not self._state.quiet:
                self._state.wake_all()


class QueueRuns:
    """The parts of many runs in a closure queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      has_room: notified when fewer closures wait.
      hand_out: wakes idle workers for a closure; called with the lock held.
      cancel: cancels a closure, with an error unless its user does; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        has_room: threading.Condition,
        hand_out: Callable[[int | None], None],
        cancel: Callable[[Closure, BaseException | None], bool],
    ) -> None:
        self._lock = lock
        self._state = state
        self._has_room = has_room
        self._hand_out = hand_out
        self._cancel = cancel

    def available(self, attempt: Attempt) -> int:
        """Returns how many runs a started attempt may make in its call; it may change at any time."""
        with self._lock:
            return available(attempt)

    def begin(self, attempt: Attempt, choose: Callable[[int], int]) -> int:
        """Begins the call of a started attempt; the runs of its share that it is not to make wait for other workers.

        Args:
          attempt: was started just now.
          choose: takes the number of runs that are possible, returns how many to make. Called with the lock held.

        Returns:
          The number of runs to make.
        """
        closure, state = attempt.closure, self._state
        with self._lock:
            if not closure.has_ended and not state.is_unwanted(closure):
                is_alone = state.is_paused_or_quiet or state.is_over_for(attempt.worker)
                count = 1 if is_alone else choose(available(attempt))
                self._leave_others(attempt, count)
                return count
        # What cancels it may be on its way still.
        self._cancel(closure, state.unwanted_error(closure))
        return 1

    def cancel(self, whole: RunsFuture) -> bool:
        """Cancels all runs that have not ended; returns False if there are none."""
        while True:
            with self._lock:
                part = next(iter(whole.parts), None)
            if part is None:
                return False
            if self._cancel(part, None):
                return True

    def _leave_others(self, attempt: Attempt, count: int) -> None:
        """Leaves an attempt this many runs; the others wait, fewer than before if it takes more than its share."""
        closure, state = attempt.closure, self._state
        more = count - closure.runs
        rest = number(attempt, count)
        # It waits again if it is overdue.
        state.waiting.recount(closure)
        if rest is not None and rest.counts:
            state.waiting.recount(rest)
            if not rest.runs:
                state.waiting.remove(rest)
                state.unsettled -= 1
        elif rest is not None:
            state.add_rest(rest)
        if more > 0:
            self._has_room.notify(more)
        self._hand_out(closure.target)


# No number of reconnections.
_NEVER = -1


class QueueWorkers:
    """The workers that take closures from a queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      unused_cancellations: of workers whose last `take` returned nothing.
      carry_out: carries out effects; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        unused_cancellations: dict[int, Cancellation],
        carry_out: Callable[[Effects], None],
    ) -> None:
        self._lock = lock
        self._state = state
        self._unused_cancellations = unused_cancellations
        self._carry_out = carry_out

    def admit(self, worker: int) -> None:
        """Gives a new worker closures, and counts from 0 for it."""
        with self._lock:
            self._state.dismissed.discard(worker)
            self._state.waiting.away.discard(worker)
            self._state.worker_counts.pop(worker, None)
            self._state.waiting.inputs.renew(worker)

    def dismiss(self, worker: int) -> None:
        """Gives a worker no closure any more."""
        with self._lock:
            self._state.dismissed.add(worker)
            self._state.waiting.inputs.workers.discard(worker)
            self._state.interrupt(worker)
            # It may have been the last one that closures waited for which were lost on the others.
            self._state.wake()
        self._unused_cancellations.pop(worker, None)
        self.fail_starved(worker)

    def set_away(self, worker: int, *, is_away: bool) -> None:
        """Records that a worker was lost, or has returned. What avoids other workers may then run there, or here."""
        with self._lock:
            (self._state.waiting.away.add if is_away else self._state.waiting.away.discard)(worker)
            self._state.wake()

    def await_another(self, closure: Closure) -> bool:
        """Has a closure that was lost on one worker wait for any other one; returns False if there is no other."""
        waiting = self._state.waiting
        with self._lock:
            apart = Apart(closure.inputs, closure.lost_on, needs_another=True)
            was_always_one = len(closure.lost_on) == 1 and closure.target is None
            closure.needs_another = was_always_one and waiting.has_other(apart, is_present=False)
            return closure.needs_another

    def renew_inputs(self, worker: int) -> None:
        """Records that a worker was reconnected, so that its parts of all inputs begin again."""
        with self._lock:
            # One that was removed meanwhile would be waited for as long as it has data left: for ever.
            if worker not in self._state.dismissed:
                self._state.waiting.inputs.renew(worker)

    def renew_input(self, renewed: FiniteInput) -> None:
        """Records that the parts of an input have not ended any more: they are at earlier positions."""
        with self._lock:
            # Not emptied: closures that wait for it stay where they are.
            renewed.ended = dict.fromkeys(renewed.ended, _NEVER)
            for inputs in [each for each in self._state.ends if renewed in each]:
                del self._state.ends[inputs]
            self._state.wake()

    def give_up(self, worker: int, new_error: Callable[[], BaseException]) -> None:
        """Stops waiting for a lost worker: fails the closures for which only such workers have data left."""
        with self._lock:
            self._state.waiting.inputs.given_up[worker] = new_error
        self.fail_starved(None)

    def end_input(self, attempt: Attempt, failure: Failure, scope: ErrorScope) -> None:
        """Records that an input has ended on an attempt's worker; its closure waits for a worker that has data left.

        Args:
          attempt: the attempt.
          failure: names the input, and has the error with which closures end once it has ended on all workers.
          scope: what that error affects.
        """
        with self._lock:
            effects = self._end_input(attempt, failure, scope)
            self._state.wake()
        self._carry_out(effects)
        self.fail_starved(attempt.worker)

    @uninterrupted
    def fail_starved(self, worker: int | None) -> None:
        """Fails the closures that no worker can run; of those for one worker, only those for `worker`."""
        while True:
            with self._lock:
                starved = self._state.waiting.starved(worker)
            if not starved:
                return
            _, reason = starved[0]
            error = reason.new_error()
            with self._lock:
                effects = self._fail_starved(worker, reason.new_error, error)
            self._carry_out(effects)

    def requeue_overdue(self) -> float | None:
        """Puts each closure that exceeded its timeout at the front, to be tried beside its latest attempt.

        Returns:
          When the next one will exceed its timeout, on the `time.monotonic` clock; None if none can.
        """
        state, now = self._state, time.monotonic()
        deadlines = []
        with self._lock:
            for attempt in list(state.running):
                closure = attempt.closure
                if closure.timeout is None or closure.has_ended or closure.is_queued or closure.live[-1] is not attempt:
                    continue
                deadline = attempt.started + closure.timeout
                if deadline > now:
                    deadlines.append(deadline)
                elif not state.is_unwanted(closure):
                    state.waiting.add(closure, at_front=True)
                    state.wake(closure.target)
        return min(deadlines, default=None)

    def interrupt(self, worker: int) -> None:
        """Makes `take` return nothing, if a worker waits in it."""
        with self._lock:
            self._state.interrupt(worker)

    def attempts_on(self, worker: int) -> list[Attempt]:
        """Returns what a worker runs."""
        return [attempt for attempt in self.attempts() if attempt.worker == worker]

    def attempts(self) -> list[Attempt]:
        """Returns what runs."""
        with self._lock:
            return list(self._state.running)

    def cancel_attempts(self, worker: int) -> None:
        """Cancels what a worker runs, which is then requeued."""
        self._carry_out(Effects(cancelled=self.attempts_on(worker)))

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run."""
        with self._lock:
            return self._state.waiting.waiting_for(worker)

    def waiting_with(self, closure: Closure) -> int:
        """Returns how many closures wait where a running one for all workers did; some may have been cancelled."""
        return len(self._state.waiting.queue_with(closure))

    def work_like(self, closure: Closure) -> Any:
        """Returns the work of the next closure, if it has the fusion key of a running one that was for all workers."""
        with self._lock:
            others = (each for each in self._state.waiting.queue_with(closure) if each.is_queued)
            found = next(others, None)
            return found.work if found is not None and found.fusion_key == closure.fusion_key else None

    def idle(self) -> list[int]:
        """Returns the workers that wait in `take`, longest first."""
        with self._lock:
            return list(self._state.idle)

    def counts(self, worker: int) -> WorkerCounts:
        """Returns what the attempts on a worker came to."""
        with self._lock:
            return dataclasses.replace(self._state.worker_counts[worker])

    def _end_input(self, attempt: Attempt, failure: Failure, scope: ErrorScope) -> Effects:
        """Ends an attempt, without an outcome unless no worker has data left."""
        state, ended = self._state, failure.ended
        assert ended is not None
        state.waiting.end_input(ended, attempt.worker, scope)
        starved = state.waiting.inputs.why_starved(attempt.closure)
        if starved is None or starved.new_error is not ended.new_error:
            return state.requeue(attempt, FailureKind.END_OF_DATA.value)
        state.end_attempt(attempt)
        effects = state.decide(attempt, ClosureState.FAILED, failure.error, scope)
        effects.ended = attempt
        effects.outcomes += self._fail_starved(attempt.worker, ended.new_error, failure.error).outcomes
        return effects

    def _fail_starved(
        self, worker: int | None, new_error: Callable[[], BaseException], error: BaseException
    ) -> Effects:
        """Ends the closures that no worker can run.

        Args:
          worker: of those for one worker, only those for this one.
          new_error: only those whose errors it creates.
          error: has been created by it.
        """
        state, effects = self._state, Effects()
        for closure, starved in state.waiting.starved(worker):
            if starved.new_error is not new_error or closure.has_ended:
                continue
            if closure.live:
                state.waiting.remove(closure)
            else:
                effects.outcomes += state.end(closure, ClosureState.FAILED, error, starved.scope).outcomes
        return effects


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
