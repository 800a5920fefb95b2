r"""The queue where a closure waits until a worker may run it, and where its outcome is decided.

    schedule --put--> [ waiting, in order ] --take--> attempt --finish / fail--> outcome
                           ^                            |
                           \---------- requeue ---------/

Any worker takes a closure without a target. Only the target takes a closure with a target, before other closures.
`wait_settled` and the pending error ignore internal closures, which the library schedules for itself.

Guarantees:
- Closures start first in, first out. A requeued closure goes to the front, and never waits for room.
- An outcome is decided once, and `wait_settled` returns only after all futures are set.
- The pending error is raised once, by the first waiting call, after everything has settled.
- A closure whose input has ended on a worker runs on another worker, and fails if the input has ended on all.
- A worker that finds no closure sleeps until there is a closure that it may run. A closure wakes one worker.
- Each wait has a deadline, or the log reports it when nothing progresses. Each wait ends when the queue is stopped.
- What follows from the end of a call is under way before anyone can see that end, and `wait_consequences` waits for it.
- There is one lock. While the lock is held, only code of the core and of the standard library runs: no TensorFlow, no
  runtime, no user code (futures' callbacks, destructors of arguments).

In a quiet period no scheduled closure runs, so all that the client reads and saves is of the same point in time.

    begin: no scheduled closure starts --> each worker ends what it runs, and reports that it is idle --> the block
    end:   closures start again, unless another period goes on

Guarantees:
- Inside the block no scheduled closure runs, and no worker reports that it is idle. Internal closures may run.
  Cancelled calls that did not end may run too, and the log names these calls.
- A worker reports that it is idle when its running call has ended. So a closure that waits for other workers at the
  gate of an update rule continues before the end of the period.
- Closures start again after the block, also after an error in the block or in the wait before the block.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.errors import StrategyClosedError, WorkerLost
from coordinator.events.event_stream import EventStream
from coordinator.queueing.closure import (
    CANCELLED,
    FAILED,
    Attempt,
    Closure,
    Effects,
    ErrorScope,
    RunsClosure,
    RunsFuture,
    shared_cancellations,
)
from coordinator.queueing.queue_state import Apart, QueueState, Starved
from coordinator.queueing.waits import CountedCondition, deadline_after, description, uninterrupted
from coordinator.runtime import Cancellation, Failure, FailureKind, FiniteInput
from coordinator.statistics import ClusterStatistics, WorkerCounts

_logger = logging.getLogger("coordinator")

# A loop over finite data schedules at full speed until this many closures per worker wait, enough for two fused calls.
_AHEAD_PER_WORKER = 128
# How long a loop over finite data then waits, in seconds.
_MOMENT = 0.01
# This value differs from every number of reconnections.
_NEVER = -1


class Outside:
    """A scope, for any number of uses, in which a worker runs a call or waits for something outside of the client."""

    __slots__ = ("_queue", "_worker")

    def __init__(self, queue: "ClosureQueue", worker: int) -> None:
        self._queue = queue
        self._worker = worker

    def __enter__(self) -> None:
        self._queue.end_consequences(self._worker)

    def __exit__(self, *_: object) -> None:
        self._queue.begin_consequences(self._worker)


class ClosureQueue:
    """A queue of closures with back-pressure, retries, one pending error, cancellation and quiet periods.

    Any thread may call any method, but only one thread may call `take` for a worker. `put` blocks while `capacity`
    closures wait. `report_stall` gets a report when a waiting thread sees no progress for `stall_interval` seconds. The
    queue calls `report_stall` and `new_cancellation` without the lock. `events` records what happens to closures. The
    times of closures and attempts are by `clock`.
    """

    def __init__(
        self,
        capacity: int,
        new_cancellation: Callable[[], Cancellation],
        report_stall: Callable[[str], None],
        stall_interval: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.capacity = capacity
        self.clock = clock
        self.events = EventStream()
        self._new_cancellation = new_cancellation
        # A worker whose last `take` returned None reuses its cancellation: the runtime may need long to create another.
        self._unused_cancellations: dict[int, Cancellation] = {}
        self._report_stall = report_stall
        self._stall_interval = stall_interval
        self._state = QueueState(self.clock.now)
        self._lock = threading.Lock()
        self._has_room = CountedCondition(self._lock)
        self._settled = CountedCondition(self._lock)
        self._attempt_ended = CountedCondition(self._lock)
        self._consequence_ended = CountedCondition(self._lock)
        self.events.on_delivery = self._notify_consequences

    # For the user's threads and the scheduler.

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Adds a closure. If the queue is full and the closure not internal, waits at most `timeout` seconds for room.

        If `put` raises, the closure's future is cancelled.

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
                    self._yield_to_workers(closure)
                is_starved = closure.inputs and state.waiting.why_starved(closure)
                if state.waiting.count >= self.capacity or state.error is not None or state.stopped or is_starved:
                    starved = self._wait_to_put(closure, deadline_after(timeout))
                if starved is None:
                    state.add(closure)
                    if state.idle:
                        state.wake(closure.target)
                else:
                    state.ends.pop(closure.inputs, None)
            if starved is not None:
                raise starved.new_error()
        except BaseException:
            # The closure is cancelled after Ctrl-C too, which may have come before a worker was woken for the closure.
            self.cancel(closure, closure.cancelled_error("it could not be scheduled: see what schedule raised"))
            raise

    @uninterrupted
    def unblock(self, closure: Closure) -> None:
        """Records that one of the results exists for which a closure waits."""
        with self._lock:
            if not closure.has_ended:
                self._state.unblock(closure)
                self._state.wake(closure.target)
            is_starved = closure.inputs and self._state.waiting.why_starved(closure)
        if is_starved:
            self._fail_starved(closure.target)

    @uninterrupted
    def cancel(self, closure: Closure, error: BaseException | None = None) -> bool:
        """Cancels a closure: its future raises `error`, or is cancelled. Returns False if the closure has ended."""
        with self._lock:
            if closure.has_ended:
                return False
            effects = self._state.end(closure, CANCELLED, error)
        self._carry_out(effects)
        return True

    def cancel_runs(self, whole: RunsFuture) -> bool:
        """Cancels all runs that have not ended; returns False if all runs have ended."""
        while True:
            with self._lock:
                part = next(iter(whole.parts), None)
            if part is None:
                return False
            if self.cancel(part):
                return True

    def cancel_all(self, timeout: float) -> list[Attempt]:
        """Cancels all scheduled closures and pending errors; waits at most `timeout` seconds.

        Returns the attempts that still run. Nothing waits for these attempts from now on.
        """
        cancelled = self._cancel_scheduled()
        with self._lock:
            # A `schedule` call that waits to raise an error must see that the error is dropped.
            self._notify_all()
            self._attempt_ended.wait_for(lambda: self._state.running.keys().isdisjoint(cancelled), timeout)
            abandoned = self._state.abandon(cancelled)
            self._notify_settled()
            return abandoned

    def wait_settled(self, timeout: float | None = None, unless: Callable[[], bool] = lambda: False) -> None:
        """Waits at most `timeout` seconds until no closure waits or runs.

        The wait also ends if `unless()` returns True after a call of `wake_waits`. So a thread of the library can wait
        in place of the user's thread, which runs a function of TensorFlow.

        Raises:
          TimeoutError: the wait timed out; the message names what still runs.
          RuntimeError: this thread has begun a quiet period.
          BaseException: the pending error, which is raised once, and not if `unless()` is true.
        """
        with self._lock:
            self._refuse_in_quiet("join was called")
            self._until(
                self._settled,
                lambda: self._state.unsettled == 0 or unless(),
                "join waits for closures",
                deadline_after(timeout),
            )
            if not unless():
                self._raise_pending_error()

    def wait_consequences(self, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds until all has happened that follows from the calls that have ended.

        Raises:
          TimeoutError: the wait timed out; the message names what it waited for.
          RuntimeError: the caller is a callback, for whose own end this would wait.
        """
        deadline, under_way = deadline_after(timeout), self._state.under_way
        awaited = "settled waits for {}, as all that follows from ended calls is to be done"
        listeners = self.events.listeners()
        if threading.get_ident() in [*under_way.copy().values(), *(listener.thread.ident for listener in listeners)]:
            raise RuntimeError("settled was called in a callback and would wait for itself. Call it on another thread.")
        with self._lock:
            # It is counted before the first look, because what is under way ends without the lock if nothing waits.
            self._consequence_ended.waiters += 1
            try:
                # Active workers that are idle report it now, and the others when they are.
                for worker in self._state.active:
                    self._state.interrupt(worker)
                for key, begun in under_way.copy().items():
                    who = f"worker {key}" if isinstance(key, int) else key
                    has_ended = functools.partial(lambda key, begun: under_way.get(key) is not begun, key, begun)
                    self._until(self._consequence_ended, has_ended, awaited.format(who), deadline)
                number = self.events.recorded
                for listener in self.events.listeners():
                    has_ended = functools.partial(listener.deliver, number)
                    self._until(self._consequence_ended, has_ended, awaited.format(listener), deadline)
            finally:
                self._consequence_ended.waiters -= 1

    @contextlib.contextmanager
    def consequences(self) -> Iterator[None]:
        """A scope in which this thread, not a worker's, changes and reports something that others may see at once."""
        thread = threading.current_thread()
        is_inner = thread in self._state.under_way
        self._state.under_way.setdefault(thread, threading.get_ident())
        try:
            yield
        finally:
            if not is_inner:
                self.end_consequences(thread)

    def wait_for_room(self, timeout: float | None, unless: Callable[[], bool]) -> None:
        """Waits until `put` would not wait. Raises TimeoutError after `timeout`. For `unless` see `wait_settled`."""
        deadline = deadline_after(timeout)
        with self._lock:
            self._until_room(unless, "", deadline)
            self._until_error_settled("schedule waits to raise an earlier error", deadline, unless)
            # If `unless()` ended this wait, another thread may use the room.
            self._has_room.notify()

    @property
    def is_free(self) -> bool:
        """Whether `put` would not wait now, and `wait_settled` would not raise."""
        return self._state.error is None and self._state.waiting.count < self.capacity

    def wake_waits(self) -> None:
        with self._lock:
            self._notify_all()

    def is_settled(self) -> bool:
        """Returns whether no closure waits or runs. Raises the pending error, once, after all attempts have ended."""
        with self._lock:
            self._raise_when_settled("done waits to raise an error", None)
            return self._state.unsettled == 0

    @contextlib.contextmanager
    def quiet(self, timeout: float | None) -> Iterator[None]:
        """A scope in which no scheduled closure runs. Waits at most `timeout` seconds for closures that run before.

        Raises TimeoutError, which says what still runs, or StrategyClosedError if the queue was stopped.
        """
        deadline = deadline_after(timeout)
        state, period = self._state, object()
        try:
            self._begin_quiet(period)
            with self._lock:
                awaited = "strategy.quiet() waits for functions that run"
                self._until(self._attempt_ended, lambda: state.stopped or state.is_quiet, awaited, deadline)
                self.refuse_stopped("A quiet period cannot begin")
                abandoned = [*state.abandoned]
            for attempt in abandoned:
                _logger.warning(
                    "strategy.quiet() does not wait for the call of %s on worker %d, which was cancelled and does not "
                    "end; what it still writes may come in between.",
                    attempt.closure,
                    attempt.worker,
                )
            yield
        finally:
            self._end_quiet(period)

    @uninterrupted
    def fail_waiting(self, closure: Closure, error: BaseException, scope: ErrorScope) -> None:
        """Ends a waiting closure that can never run. Does nothing to a closure that runs or has ended."""
        with self._lock:
            if closure.has_ended or closure.live:
                return
            effects = self._state.end(closure, FAILED, error, scope)
        self._carry_out(effects)

    def fail_orphaned(self, worker: int) -> None:
        """If this worker was dismissed, perhaps during a `put`, fails the closures that only this worker may run."""
        if worker not in self._state.dismissed:
            return
        for closure in self.waiting_for(worker):
            message = f"{closure} may run only on worker {worker}, which was removed. Schedule it on another worker."
            self.fail_waiting(closure, WorkerLost(f"worker {worker}", message), ErrorScope.JOIN)

    def fail_all(self, error: BaseException, *, if_idle: bool) -> None:
        """Makes `error` pending because no closure can run; with `if_idle` even if there is no closure now."""
        with self._lock:
            effects = self._state.fail_all(error) if if_idle or self._state.unsettled else Effects()
        self._carry_out(effects)

    def pause(self, reason: str) -> None:
        """Starts no closure until `resume`. Cancels running attempts, after which their closures are requeued."""
        with self._lock:
            self._state.paused = reason
            effects = Effects(cancelled=list(self._state.running))
        self._carry_out(effects)

    @property
    def is_paused(self) -> bool:
        return bool(self._state.paused)

    def wait_idle(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until no attempt runs; returns whether no attempt runs."""
        with self._lock:
            return self._attempt_ended.wait_for(lambda: not self._state.running, timeout)

    def resume(self) -> None:
        with self._lock:
            self._state.paused = ""
            self._state.wake_all()

    @uninterrupted
    def stop(self) -> None:
        """Cancels all closures, and makes every `take` return. A second call of `stop` does nothing more."""
        with self._lock:
            effects = self._state.stop()
            for worker in list(self._state.idle):
                self._state.interrupt(worker)
            self._notify_all()
        self._carry_out(effects)

    def refuse_stopped(self, what: str) -> None:
        """If the queue was stopped, raises StrategyClosedError, whose message begins with `what`."""
        if self._state.stopped:
            raise StrategyClosedError(f"{what}: the strategy is closed.")

    @property
    def is_stopped(self) -> bool:
        return self._state.stopped

    def statistics(self) -> ClusterStatistics:
        """Returns the counts of all closures, without counts of workers."""
        with self._lock:
            return self._state.statistics()

    def steps(self) -> int:
        """Returns how many runs of scheduled closures have finished, without internal closures."""
        return self._state.steps

    # For a worker's thread.

    def begin_consequences(self, who: int | threading.Thread) -> None:
        """Records that a worker, or another thread, does what follows from what has ended, until `end_consequences`."""
        self._state.under_way.setdefault(who, object())

    def end_consequences(self, who: int | threading.Thread) -> None:
        self._state.under_way.pop(who, None)
        if self._consequence_ended.waiters:
            self._notify_consequences()

    def _notify_consequences(self) -> None:
        if self._consequence_ended.waiters:
            with self._lock:
                self._consequence_ended.notify_all()

    def take(self, worker: int, timeout: float | None = None) -> Attempt | None:
        """Waits at most `timeout` seconds for the next closure that `worker` may run, and starts an attempt.

        Returns None if no closure came in time, the worker was interrupted or dismissed, the queue is stopped, or a
        quiet period or `wait_consequences` waits for the worker's report that it is idle.
        """
        cancellation = self._unused_cancellations.pop(worker, None) or self._new_cancellation()
        state, idle, is_late = self._state, None, False
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                is_interrupted = False
                state.under_way.setdefault(worker, cancellation)
                if idle is not None:
                    state.idle.pop(worker, None)
                    is_interrupted = idle.is_interrupted
                attempt = None if is_interrupted else state.start_next(worker, cancellation)
                if attempt is not None and self._has_room.waiters:
                    self._has_room.notify(attempt.closure.runs)
                if idle is not None:
                    state.waking.pop(worker, None)
                    state.wake()
                    if state.quiet:
                        self._notify_settled()
                is_to_report = (state.quiet or self._consequence_ended.waiters) and worker in state.active
                is_over = is_late or is_interrupted or is_to_report
                if attempt is not None or is_over or state.stopped or worker in state.dismissed:
                    break
                # The worker waits again if another worker has taken the closure for which this worker woke.
                idle = state.wait(worker)
                if self._consequence_ended.waiters:
                    self._consequence_ended.notify_all()
            is_late = not idle.wait(None if deadline is None else deadline - time.monotonic())
        if attempt is None:
            self._unused_cancellations[worker] = cancellation
        return attempt

    def share_with(self, closure: Closure) -> int:
        """Returns one worker's fair share of the deque from which `closure`, which is for all workers, was taken.

        The share includes `closure`. Some closures in the deque may have been cancelled.
        """
        waiting = self._state.waiting
        if not (waiting.for_all or waiting.apart):
            return 1
        return self.share(1 + len(waiting.queue_with(closure)))

    def share(self, waiting: int) -> int:
        """Returns how many of `waiting` closures or runs one worker may take."""
        return -(-waiting // max(self.live_workers, 1))

    @property
    def live_workers(self) -> int:
        """The number of workers that share the waiting closures: all workers that are not away."""
        return len(self._state.waiting.workers) - len(self._state.waiting.away)

    def work_like(self, closure: Closure) -> Any:
        """Returns the next closure's work if that closure has the fusion key of `closure`, which is for all workers."""
        with self._lock:
            for other in self._state.waiting.queue_with(closure):
                if other.is_queued:
                    return other.work if other.fusion_key == closure.fusion_key else None
        return None

    def take_batch(self, attempt: Attempt, limit: int, choose: Callable[[int], int]) -> list[Attempt]:
        """Takes, without waiting, closures from the front that may run in one call with a just started attempt.

        `choose` maps the possible number of attempts, at most `limit`, to the number to take, with the lock held.
        Returns the attempts, `attempt` first. Each attempt can be cancelled; cancelling all cancels the call.
        """
        state, closure = self._state, attempt.closure
        with self._lock:
            is_wanted = not (closure.has_ended or state.is_unwanted(closure) or state.is_over_for(attempt.worker))
            if not is_wanted or state.is_paused_or_quiet or closure.fusion_key is None:
                return [attempt]
            count = choose(1 + state.waiting.matching_ahead(closure, attempt.worker, limit - 1))
            if count == 1:
                return [attempt]
            self._has_room.notify(count - 1)
            attempt.cancellation, *others = shared_cancellations(attempt.call_cancellation, count)
            attempts = [attempt]
            for cancellation in others:
                other = state.start_next(attempt.worker, cancellation, beside=closure)
                assert other is not None
                other.call_cancellation = attempt.call_cancellation
                attempts.append(other)
            return attempts

    def available_runs(self, attempt: Attempt) -> int:
        """Returns how many runs a started attempt may make in its call. The number may change at any time."""
        assert isinstance(attempt.closure, RunsClosure)
        with self._lock:
            return attempt.closure.available()

    def begin_runs(self, attempt: Attempt, choose: Callable[[int], int]) -> int:
        """Begins the call of a just started attempt; returns the call's number of runs. The closure's other runs wait.

        `choose` maps the possible number of runs to the number to make. `choose` is called with the lock held.
        """
        closure, state = attempt.closure, self._state
        assert isinstance(closure, RunsClosure)
        with self._lock:
            if not closure.has_ended and not state.is_unwanted(closure):
                is_alone = state.is_paused_or_quiet or state.is_over_for(attempt.worker)
                count = 1 if is_alone else choose(closure.available())
                self._leave_others(closure, attempt, count)
                return count
        # The closure has ended, or it is unwanted and may not be cancelled yet.
        self.cancel(closure, state.unwanted_error(closure))
        return 1

    def requeue(self, attempt: Attempt, reason: str = "") -> None:
        """Ends an attempt without an outcome; its closure waits at the front if it is still wanted."""
        with self._lock:
            effects = self._state.requeue(attempt, reason)
            self._state.wake(attempt.closure.target)
            is_over = self._state.is_over_for(attempt.worker)
        self._carry_out(effects)
        if is_over:
            # Perhaps only the removed worker had data left.
            self._fail_starved(attempt.worker)

    def finish(self, attempts: Sequence[Attempt], results: Sequence[object]) -> None:
        """Records the results of a call. Each result decides its closure if no other attempt has decided it."""
        with self._lock:
            effects = self._state.finish(attempts, results)
        self._carry_out(effects, attempts)

    def fail(self, attempt: Attempt, error: BaseException, scope: ErrorScope) -> None:
        """Records the error of an attempt that is not retried. The error decides the closure as a result does."""
        with self._lock:
            effects = self._state.decide(attempt, FAILED, error, scope)
        self._carry_out(effects, [attempt])

    def end_input(self, attempt: Attempt, failure: Failure, scope: ErrorScope) -> None:
        """Records that an input has ended on an attempt's worker; the closure waits for a worker with data left.

        `failure` has the input, and the error, with this scope, for closures if the input has ended on all workers.
        """
        state, ended = self._state, failure.ended
        assert ended is not None
        with self._lock:
            state.waiting.end_input(ended, attempt.worker, scope)
            starved = state.waiting.why_starved(attempt.closure)
            if starved is None or starved.new_error is not ended.new_error:
                effects = state.requeue(attempt, FailureKind.END_OF_DATA.value)
            else:
                state.end_attempt(attempt)
                effects = state.decide(attempt, FAILED, failure.error, scope)
                effects.ended = attempt
                effects.outcomes += state.fail_starved(attempt.worker, ended.new_error, failure.error).outcomes
            state.wake()
        self._carry_out(effects)
        self._fail_starved(attempt.worker)

    def is_active(self, worker: int) -> bool:
        """Returns whether a worker has had a scheduled closure since it last reported that it is idle."""
        return worker in self._state.active

    def report_idle(self, worker: int) -> None:
        """Marks a worker as idle and wakes the waiters."""
        with self._lock:
            self._state.active.discard(worker)
            self._notify_settled()

    # For the code that watches the workers.

    def admit(self, worker: int) -> None:
        """Gives closures to a new worker, whose counts begin at 0."""
        with self._lock:
            self._state.dismissed.discard(worker)
            self._state.waiting.away.discard(worker)
            self._state.worker_counts.pop(worker, None)
            self._state.waiting.renew(worker)

    def dismiss(self, worker: int) -> None:
        """Gives no closure to a worker from now on."""
        with self._lock:
            self._state.dismissed.add(worker)
            self._state.waiting.workers.discard(worker)
            self._state.waiting.away.discard(worker)
            self._state.interrupt(worker)
            # Closures that were lost on all other workers may have waited for this worker.
            self._state.wake()
        self._unused_cancellations.pop(worker, None)
        self._fail_starved(worker)

    def set_away(self, worker: int, *, is_away: bool) -> None:
        """Records that a worker was lost or has returned, which may change where closures that were lost may run."""
        waiting = self._state.waiting
        with self._lock:
            if not is_away:
                waiting.away.discard(worker)
            elif worker in waiting.workers:
                waiting.away.add(worker)
            self._state.wake()

    def await_another(self, closure: Closure) -> bool:
        """Makes a closure that was lost on one worker wait for another worker; returns False if there is none."""
        waiting = self._state.waiting
        with self._lock:
            apart = Apart(closure.inputs, closure.lost_on, needs_another=True)
            was_always_one = len(closure.lost_on) == 1 and closure.target is None
            closure.needs_another = was_always_one and waiting.has_other(apart, is_present=False)
            return closure.needs_another

    def renew_inputs(self, worker: int) -> None:
        """Records that a worker was reconnected: the worker's parts of all inputs begin again."""
        with self._lock:
            # Closures would wait without end for a removed worker that has data left.
            if worker not in self._state.dismissed:
                self._state.waiting.renew(worker)

    def renew_input(self, renewed: FiniteInput) -> None:
        """Records that the parts of an input have data again, because their positions were set back."""
        with self._lock:
            # `ended` is not emptied, so that closures that wait for the input stay in their deque.
            renewed.ended = dict.fromkeys(renewed.ended, _NEVER)
            for inputs in [inputs for inputs in self._state.ends if renewed in inputs]:
                del self._state.ends[inputs]
            self._state.wake()

    def give_up(self, worker: int, new_error: Callable[[], BaseException]) -> None:
        """Stops waiting for a lost worker: fails the closures for which only given-up workers have data left."""
        with self._lock:
            self._state.waiting.given_up[worker] = new_error
        self._fail_starved(None)

    def requeue_overdue(self) -> float | None:
        """Puts overdue closures at the front, for another worker; returns the next deadline by the clock."""
        state, now = self._state, self.clock.now()
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
        """If the worker waits in `take`, makes `take` return None."""
        with self._lock:
            self._state.interrupt(worker)

    def attempts(self, worker: int | None = None) -> list[Attempt]:
        """Returns the live attempts on one worker, or on all workers for None."""
        with self._lock:
            return [attempt for attempt in self._state.running if worker is None or attempt.worker == worker]

    def cancel_attempts(self, worker: int) -> None:
        """Cancels a worker's attempts, after which their closures are requeued."""
        self._carry_out(Effects(cancelled=self.attempts(worker)))

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run."""
        with self._lock:
            return self._state.waiting.waiting_for(worker)

    def idle_workers(self) -> list[int]:
        """Returns the workers that wait in `take`, longest first."""
        with self._lock:
            return list(self._state.idle)

    def worker_counts(self, worker: int) -> WorkerCounts:
        with self._lock:
            return dataclasses.replace(self._state.worker_counts[worker])

    # Changes that Ctrl-C does not interrupt.

    @uninterrupted
    def _cancel_scheduled(self) -> Sequence[Attempt]:
        with self._lock:
            effects = self._state.cancel_all()
        self._carry_out(effects)
        return effects.cancelled

    @uninterrupted
    def _begin_quiet(self, period: object) -> None:
        with self._lock:
            self._state.quiet[period] = threading.current_thread()
            for worker in self._state.active:
                self._state.interrupt(worker)

    @uninterrupted
    def _end_quiet(self, period: object) -> None:
        with self._lock:
            self._state.quiet.pop(period, None)
            if not self._state.quiet:
                self._state.wake_all()

    @uninterrupted
    def _fail_starved(self, worker: int | None) -> None:
        """Fails the closures that no worker can run. Closures with a target fail only if `worker` is the target."""
        while True:
            with self._lock:
                starved = self._state.waiting.starved(worker)
            if not starved:
                return
            _, reason = starved[0]
            error = reason.new_error()
            with self._lock:
                effects = self._state.fail_starved(worker, reason.new_error, error)
            self._carry_out(effects)

    def _carry_out(self, effects: Effects, ended: Sequence[Attempt] = ()) -> None:
        """Sets futures and cancels attempts. Then counts the closures as settled and ends the attempts `ended`."""
        state, outcomes = self._state, effects.outcomes
        effects.record(self.events, ended, state.now())
        raised = None
        for closure, value in outcomes:
            try:
                closure.report(value)
            except BaseException as error:  # noqa: BLE001 - raised by a callback; the other futures must be set
                raised = raised or error
        for attempt in effects.cancelled:
            if attempt not in ended:
                attempt.cancellation.cancel()
        with self._lock:
            for attempt in ended:
                state.end_attempt(attempt)
            state.record_reported(outcomes)
            if self._consequence_ended.waiters:
                self._consequence_ended.notify_all()
            self._notify_settled(has_room=len(outcomes) > len(ended))
        for closure, _ in outcomes:
            # The work is dropped without the lock, because arguments may have destructors written by users.
            closure.work = None
        if raised is not None:
            raise raised

    # The following methods are called with the lock held, and release it to wait.

    def _leave_others(self, closure: RunsClosure, attempt: Attempt, count: int) -> None:
        """Begins `count` runs of an attempt; the other runs wait. A `count` above the share takes waiting runs."""
        state = self._state
        more = count - closure.runs
        rest = closure.begin(attempt, count)
        # An overdue closure is queued although it runs.
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
        state.wake(closure.target)

    def _yield_to_workers(self, closure: Closure) -> None:
        """If many closures wait and the closure's data may be finite, waits at most `_MOMENT` for workers to take some.

        Otherwise a loop that schedules until the data ends would hold the interpreter's lock, which the workers'
        threads need, and schedule many closures in vain.
        """
        waiting = self._state.waiting
        many = _AHEAD_PER_WORKER * len(waiting.workers)
        if waiting.count > many and any(needed.is_finite is not False for needed in closure.inputs):
            self._has_room.wait(_MOMENT)
            # Another thread may have waited longer for room.
            self._has_room.notify()

    def _wait_to_put(self, closure: Closure, deadline: float | None) -> Starved | None:
        """Waits for room if the closure is not internal; returns why no worker can run it, or None. Raises as `put`."""
        state = self._state
        if closure.is_internal and not state.stopped:
            return None

        def why_starved() -> Starved | None:
            return state.waiting.why_starved(closure) if closure.inputs else None

        if not self._may_put() and why_starved() is None:
            self._refuse_in_quiet(f"schedule would wait for room in the full queue for {closure}")
        while True:
            self._until_room(lambda: why_starved() is not None, f" for {closure}", deadline)
            self.refuse_stopped(f"{closure} cannot be scheduled")
            if state.error is None:
                return why_starved()
            self._raise_when_settled("schedule waits to raise an earlier error", deadline)

    def _may_put(self) -> bool:
        """Returns whether there is room, or `schedule` would raise an error instead of waiting for room."""
        state = self._state
        return state.stopped or state.error is not None or state.waiting.count < self.capacity

    def _until_room(self, unless: Callable[[], bool], purpose: str, deadline: float | None) -> None:
        awaited = f"schedule waits for room{purpose} in the full queue"
        self._until(self._has_room, lambda: self._may_put() or unless(), awaited, deadline)

    def _raise_when_settled(self, awaited: str, deadline: float | None) -> None:
        """If an error is pending, waits until all attempts have ended, and raises the error if no other thread did."""
        self._until_error_settled(awaited, deadline)
        if self._state.unsettled == 0:
            self._raise_pending_error()

    def _until_error_settled(
        self, awaited: str, deadline: float | None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """If an error is pending, waits until all attempts have ended or `unless()` is true."""
        state = self._state
        self._until(self._settled, lambda: state.error is None or state.unsettled == 0 or unless(), awaited, deadline)

    def _raise_pending_error(self) -> None:
        error = self._state.take_error()
        if error is not None:
            raise error

    def _refuse_in_quiet(self, what: str) -> None:
        if threading.current_thread() in self._state.quiet.values():
            raise RuntimeError(
                f"{what} inside `with strategy.quiet():`, where no scheduled function runs; it would wait for ever. "
                "Call it after the block."
            )

    def _notify_settled(self, *, has_room: bool = False) -> None:
        if has_room:
            self._has_room.notify_all()
        if self._state.unsettled == 0 and self._settled.waiters:
            self._settled.notify_all()
        if self._attempt_ended.waiters:
            self._attempt_ended.notify_all()

    def _notify_all(self) -> None:
        for condition in (self._has_room, self._settled, self._attempt_ended):
            condition.notify_all()

    def _until(
        self, condition: threading.Condition, is_true: Callable[[], bool], awaited: str, deadline: float | None
    ) -> None:
        """Waits until `is_true()`; raises TimeoutError at `deadline`, on the `time.monotonic` clock."""
        start = time.monotonic()
        progress = self._state.progress
        while not is_true():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"Timed out after {now - start:.1f} s: {awaited}; {description(self._state)}.")
            interval = self._stall_interval if deadline is None else min(self._stall_interval, deadline - now)
            was_notified = condition.wait(interval)
            if not was_notified and interval == self._stall_interval and progress == self._state.progress:
                waited = time.monotonic() - start
                report = f"No progress for {waited:.0f} s: {awaited}; {description(self._state)}."
                condition.release()
                try:
                    self._report_stall(report)
                finally:
                    condition.acquire()
            progress = self._state.progress
