"""The state of a closure queue: which closures wait, run or have ended, and which error will be raised.

The state consists of plain data structures, which start no thread and call no other code. Each event is a method call.
The method wakes workers, and returns an attempt to run or the `Effects` of the event. `ClosureQueue` guards the state
with its lock and carries out the effects.

The waiting closures are in deques: one for all workers, one for each worker, and one for each set of workers that may
run a closure if not every worker may:

    for all workers    a1 b1 a2 b2 a3        the input of a1, a2, a3 ends on worker 0; worker 1 is lost while it runs b1
                           |
    for all workers    b2                    any worker
    apart              a1 a2 a3              any worker but 0
                       b1                    any worker but 1, as long as there is another one

An idle worker sleeps until there is a closure that it may run:

    take ---> idle ---wake, interrupt---> waking ---> takes a closure, or none
                \\----------- timed out ----------------/

Guarantees: a closure wakes one worker, even if many are idle. For closures that any worker may run, only a few workers
are woken at a time; a worker that has woken wakes further workers.
"""

import itertools
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from coordinator.queueing.closure import (
    CANCELLED,
    DONE,
    ENDS,
    FAILED,
    Attempt,
    Closure,
    ClosureState,
    Effects,
    ErrorScope,
    RunsClosure,
)
from coordinator.runtime import Cancellation, FiniteInput
from coordinator.statistics import ClusterStatistics, WorkerCounts


class Starved(NamedTuple):
    """Why no worker can run a closure: a function that creates the closure's error, and what this error affects."""

    new_error: Callable[[], BaseException]
    scope: ErrorScope


class Apart(NamedTuple):
    """The attributes of a closure that not every worker may run, which decide which workers may run it.

    A worker where one of the inputs has ended may not run the closure.
    """

    inputs: tuple[FiniteInput, ...]
    lost_on: frozenset[int]
    needs_another: bool


# The deques are rebuilt when they may hold more stale entries than this number, and more than waiting closures.
_MIN_STALE = 1000


class WaitingClosures:
    """The closures that wait for a worker or for arguments.

    A closure that stops waiting in the middle of a deque stays in the deque with `is_queued` cleared, and is skipped
    later. So a waiting closure costs 8 bytes here, and the cost of cancelling does not depend on the place in the
    deque. Invariant: the first closure of a deque is queued, so a deque is empty if and only if no closure in it waits.

    When a worker is reconnected, the worker's parts of all inputs begin again. A closure waits for a lost worker only
    if none of the closure's inputs has ended on that worker.

    Attributes:
      count: how many runs of scheduled closures wait, without internal closures.
      for_all: the closures that any worker may run, and stale entries.
      away: the present workers that are lost now.
      given_up: a lost worker that no closure waits for -> the function that creates the error for such closures.
      apart: the attributes of closures that not every worker may run -> their deque, which is never empty.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.count = 0
        self._now = now
        self.workers: set[int] = set()
        self.away: set[int] = set()
        self.given_up: dict[int, Callable[[], BaseException]] = {}
        self._reconnections: Counter[int] = Counter()
        # The scope of the error of closures that no worker can run.
        self._scope = ErrorScope.END_OF_DATA
        # The key is the index of the only worker that may run the closures, or None for all workers.
        self._queues: defaultdict[int | None, deque[Closure]] = defaultdict(deque)
        self.for_all = self._queues[None]
        self._internal: defaultdict[int, deque[Closure]] = defaultdict(deque)
        self.apart: dict[Apart, deque[Closure]] = {}
        self._blocked: dict[Closure, None] = {}
        self._stale = 0

    def __iter__(self) -> Iterator[Closure]:
        return (closure for closure in itertools.chain(*self._all_queues(), self._blocked) if closure.is_queued)

    def has_next(self, worker: int, *, is_quiet: bool = False) -> bool:
        """Returns whether a worker may run one of the closures; with `is_quiet` only internal closures count."""
        if self._internal.get(worker):
            return True
        if is_quiet:
            return False
        if self.for_all or self._queues.get(worker):
            return True
        return any(self._may_run(apart, worker) for apart in self.apart)

    def pop_next(self, worker: int, beside: Closure | None = None, *, is_quiet: bool = False) -> Closure | None:
        """Removes and returns a worker's next closure: internal closures first, then its own, then others.

        With `beside`, a closure for all workers, only its former deque counts; with `is_quiet` only internal closures.
        """
        if beside is not None:
            queue = self.queue_with(beside)
        elif is_quiet:
            queue = self._internal[worker]
        else:
            queue = self._internal.get(worker) or self._queues.get(worker) or self.for_all
            if self.apart and queue is self.for_all:
                queue = min(self._queues_for_all(worker), key=lambda shared: shared[0].number, default=queue)
        if not queue:
            return None
        closure = queue.popleft()
        closure.is_queued = False
        self.count -= closure.counted
        closure.counted = 0
        if self.apart or (queue and not queue[0].is_queued):
            self._remove_stale(queue)
        return closure

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run, including internal closures."""
        queues = self._internal.get(worker, ()), self._queues.get(worker, ())
        return [closure for closure in itertools.chain(*queues) if closure.is_queued]

    def matching_ahead(self, closure: Closure, worker: int, limit: int) -> int:
        """Returns how many of a worker's next closures, at most `limit`, can join the call of `closure`, which it runs.

        These closures have the fusion key of `closure`, which is for all workers.
        """
        queue, key = self.queue_with(closure), closure.fusion_key
        others = [shared[0].number for shared in self._queues_for_all(worker) if shared is not queue]
        end = min(others, default=sys.maxsize)
        count = 0
        for other in queue:
            if not other.is_queued:
                continue
            if count == limit or other.fusion_key != key or other.number >= end:
                break
            count += 1
        return count

    def queue_with(self, closure: Closure) -> deque[Closure]:
        """Returns the deque where a closure for all workers waits, or would wait. Only this class changes the deque."""
        apart = _apart(closure)
        return self.for_all if apart is None else self.apart.get(apart) or deque()

    def add(self, closure: Closure, at_front: bool = False) -> None:
        closure.waiting_since = self._now()
        queue = None if closure.blockers else self._queue_of(closure)
        runs = 0 if closure.is_internal else closure.runs
        # These lines make no call, so Ctrl-C cannot come between them.
        closure.is_queued = True
        closure.counted = runs
        self.count += runs
        if queue is None:
            self._blocked[closure] = None
        elif at_front:
            queue.appendleft(closure)
        else:
            queue.append(closure)

    def remove(self, closure: Closure) -> None:
        """Removes a closure, if it waits."""
        if not closure.is_queued:
            return
        closure.is_queued = False
        self.count -= closure.counted
        closure.counted = 0
        if closure.blockers:
            del self._blocked[closure]
            return
        self._remove_stale(self._queue_of(closure))
        self._stale += 1
        if self._stale > max(_MIN_STALE, self.count):
            self._stale = 0
            for queue in self._all_queues():
                waiting = [closure for closure in queue if closure.is_queued]
                queue.clear()
                queue.extend(waiting)

    def recount(self, closure: Closure) -> None:
        """Updates the count of waiting runs after a closure's number of runs has changed."""
        if closure.is_queued:
            # `counted` is subtracted, because the closure may have another number of runs by now.
            self.count += closure.runs - closure.counted
            closure.counted = closure.runs

    def renew(self, worker: int) -> None:
        """Records that a worker is new or reconnected: the worker's parts of all inputs begin again."""
        self.workers.add(worker)
        self.given_up.pop(worker, None)
        self._reconnections[worker] += 1

    def end_input(self, ended: FiniteInput, worker: int, scope: ErrorScope) -> None:
        """Records that a worker's part of an input has ended. `scope` is for closures that no worker can run."""
        is_first = not ended.ended
        ended.ended[worker] = self._reconnections[worker]
        self._scope = scope
        if is_first:
            waiting = [closure for closure in self.for_all if closure.is_queued]
            self.for_all.clear()
            for closure in waiting:
                self._queue_of(closure).append(closure)

    def _has_data(self, inputs: tuple[FiniteInput, ...], worker: int) -> bool:
        reconnections = self._reconnections[worker]
        return all(needed.ended.get(worker) != reconnections for needed in inputs)

    def why_starved(self, closure: Closure) -> Starved | None:
        """Returns why no worker can run a closure; None if a worker can, or may do so after its return."""
        for ended in closure.inputs:
            if ended.ended:
                break
        else:
            return None
        workers = self.workers if closure.target is None else {closure.target}
        awaited = [worker for worker in workers if self._has_data(closure.inputs, worker)]
        if (closure.target is not None and awaited) or any(worker not in self.given_up for worker in awaited):
            return None
        return Starved(self.given_up[awaited[0]] if awaited else ended.new_error, self._scope)

    def starved(self, worker: int | None) -> list[tuple[Closure, Starved]]:
        """Returns the closures that no worker can run; closures with a target only if `worker` is the target."""
        for_worker = () if worker is None else self._queues.get(worker, ())
        starved = [(closure, self.why_starved(closure)) for closure in for_worker]
        for queue in self.apart.values():
            reason = self.why_starved(queue[0])
            starved += [(closure, reason) for closure in queue]
        return [(closure, reason) for closure, reason in starved if reason is not None and closure.is_queued]

    def has_other(self, apart: Apart, *, is_present: bool) -> bool:
        """Returns whether a worker outside `lost_on` can run closures now or, without `is_present`, after a return."""
        others = self.workers - apart.lost_on
        if is_present:
            others -= self.away
        return any(self._has_data(apart.inputs, worker) for worker in others)

    def _queues_for_all(self, worker: int) -> list[deque[Closure]]:
        """Returns the non-empty shared deques whose closures this worker may run."""
        queues = [queue for apart, queue in self.apart.items() if self._may_run(apart, worker)]
        return [*queues, self.for_all] if self.for_all else queues

    def _queue_of(self, closure: Closure) -> deque[Closure]:
        if closure.is_internal:
            assert closure.target is not None
            return self._internal[closure.target]
        if closure.target is None and (apart := _apart(closure)) is not None:
            return self.apart.setdefault(apart, deque())
        return self._queues[closure.target]

    def _all_queues(self) -> Iterable[deque[Closure]]:
        return (*self._internal.values(), *self._queues.values(), *self.apart.values())

    def _remove_stale(self, queue: deque[Closure]) -> None:
        while queue and not queue[0].is_queued:
            queue.popleft()
        if not queue and self.apart:
            self.apart = {apart: waiting for apart, waiting in self.apart.items() if waiting}

    def _may_run(self, apart: Apart, worker: int) -> bool:
        if not self._has_data(apart.inputs, worker):
            return False
        return worker not in apart.lost_on or not self.has_other(apart, is_present=not apart.needs_another)


def _apart(closure: Closure) -> Apart | None:
    lost_on = closure.lost_on if closure.failures else frozenset()
    if not lost_on:
        for needed in closure.inputs:
            if needed.ended:
                break
        else:
            return None
    return Apart(closure.inputs, lost_on, closure.needs_another)


class IdleWorker:
    """One wait of one worker for a closure. The lock `wakeup` is released to wake the worker.

    If `is_interrupted`, the woken worker takes no closure.
    """

    __slots__ = ("index", "is_interrupted", "wakeup")

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_interrupted = False
        self.wakeup = threading.Lock()
        self.wakeup.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Waits at most `timeout` seconds, without the queue's lock; returns whether the worker was woken."""
        return self.wakeup.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))


# A woken thread that waits for the interpreter's lock requests it every few milliseconds. Hundreds of such threads cost
# more than the work for which they wake.
_MAX_WAKING = 4


class QueueState:
    """The state of a `ClosureQueue`.

    Attributes:
      now: returns the time of the queue's clock, in seconds.
      idle: the workers that wait for a closure, longest first.
      waking: a worker that was woken and has not taken the queue's lock yet -> whether it was woken for a closure
        before a quiet period. Such a closure counts as started, and runs before the period begins.
      abandoned: the live attempts that were cancelled and did not end in time.
      unsettled: how many scheduled closures have no outcome, or were cancelled and still run.
      error: the pending error, which cancelled all other closures.
      late_error: an error that is raised when everything is settled.
      ends: inputs -> the error that says that their data has ended, raised if there is no other error.
      paused: why no closure may start; "" if closures may.
      quiet: a period in which no scheduled closure may start -> the thread that began the period.
      active: the workers that have had a scheduled closure since they last reported that they are idle.
      under_way: who carries out what follows from a call that has ended: a worker, a closure whose outcome is decided
        and not reported yet, or another thread -> an object that differs each time, or the identity of the thread. A
        worker is not under way while it is idle, runs a call or waits for its task. Changed without the lock, too.
      dismissed: the workers that may start no closure.
      steps: how many runs of scheduled closures have finished.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.waiting = WaitingClosures(now)
        self.idle: OrderedDict[int, IdleWorker] = OrderedDict()
        self.waking: dict[int, bool] = {}
        self.running: dict[Attempt, None] = {}
        self.abandoned: set[Attempt] = set()
        self.unsettled = 0
        self.error: BaseException | None = None
        self.late_error: BaseException | None = None
        self.ends: dict[tuple[FiniteInput, ...], BaseException] = {}
        self.paused = ""
        self.quiet: dict[object, threading.Thread] = {}
        self.active: set[int] = set()
        self.under_way: dict[int | Closure | threading.Thread, object] = {}
        self.dismissed: set[int] = set()
        self.stopped = False
        self.retried = 0
        self.steps = 0
        self.worker_counts: defaultdict[int, WorkerCounts] = defaultdict(WorkerCounts)
        self._ended: Counter[ClosureState] = Counter()

    @property
    def progress(self) -> tuple[int, ...]:
        """A value that changes whenever a closure makes progress."""
        return (*self._ended.values(), self.retried)

    @property
    def is_paused_or_quiet(self) -> bool:
        """Whether no scheduled closure may start."""
        return bool(self.paused or self.quiet)

    @property
    def is_quiet(self) -> bool:
        """Whether no scheduled closure runs or has woken a worker, and all workers have reported that they are idle.

        Abandoned attempts, which may never end, and their workers, which can start nothing, do not count.
        """
        return not (self.active - {attempt.worker for attempt in self.abandoned} or any(self.waking.values())) and all(
            attempt.closure.is_internal or attempt in self.abandoned for attempt in self.running
        )

    def is_over_for(self, worker: int) -> bool:
        """Returns whether a worker will never again start a closure."""
        return self.stopped or worker in self.dismissed

    def is_unwanted(self, closure: Closure) -> bool:
        """Returns whether a closure without an outcome must not be tried again."""
        return self.stopped or (self.error is not None and not closure.is_internal)

    def unwanted_error(self, closure: Closure) -> BaseException:
        why = "the strategy was closed" if self.stopped else "another closure failed while it ran"
        return closure.cancelled_error(why)

    def add(self, closure: Closure) -> None:
        # The order matters: if Ctrl-C comes in between, `put` cancels the closure, and no `join` waits for it.
        self.waiting.add(closure)
        if not closure.is_internal:
            closure.counts = True
            self.unsettled += 1

    def add_rest(self, rest: Closure) -> None:
        """Adds the closure of the remaining runs after a worker has taken its share."""
        rest.counts = True
        self.unsettled += 1
        self.waiting.add(rest, at_front=True)

    def unblock(self, closure: Closure) -> None:
        is_last = closure.blockers == 1
        if is_last:
            self.waiting.remove(closure)
        closure.unblock()
        if is_last:
            self.waiting.add(closure)

    def wait(self, worker: int) -> IdleWorker:
        """Adds a worker to the idle workers."""
        assert worker not in self.idle, f"two threads take for worker {worker}"
        self.idle[worker] = idle = IdleWorker(worker)
        self.under_way.pop(worker, None)
        return idle

    def interrupt(self, worker: int) -> None:
        """If a worker is idle, wakes the worker, which then takes no closure."""
        idle = self.idle.pop(worker, None)
        if idle is not None:
            self.waking[worker] = False
            self.under_way[worker] = idle
            idle.is_interrupted = True
            idle.wakeup.release()

    def wake(self, worker: int | None = None) -> None:
        """Wakes idle workers that may start a closure: `worker`, or for None a few workers, the longest idle first."""
        waiting = self.waiting
        woken: Sequence[int] = ()
        if self.paused or not self.idle:
            return
        if worker is not None:
            if worker in self.idle and waiting.has_next(worker, is_quiet=bool(self.quiet)):
                woken = (worker,)
        elif not self.quiet:
            able: Iterable[int] = self.idle
            count = len(waiting.for_all)
            if waiting.apart:
                able = (index for index in self.idle if waiting.has_next(index))
                count += sum(map(len, waiting.apart.values()))
            woken = tuple(itertools.islice(able, max(0, min(count, _MAX_WAKING) - len(self.waking))))
        for index in woken:
            idle = self.idle[index]
            # These lines make no call, so Ctrl-C cannot come between them.
            del self.idle[index]
            self.waking[index] = not self.quiet
            self.under_way[index] = idle
            idle.wakeup.release()

    def wake_all(self) -> None:
        """Wakes the idle workers that may start a closure, after a pause or quiet period."""
        for worker in list(self.idle):
            if self.waiting.waiting_for(worker):
                self.wake(worker)
        self.wake()

    def start_next(self, worker: int, cancellation: Cancellation, beside: Closure | None = None) -> Attempt | None:
        """Starts a worker's next closure; returns None if there is none. For `beside` see `pop_next`."""
        if self.paused or self.stopped or worker in self.dismissed:
            return None
        is_quiet = bool(self.quiet) and not self.waking.get(worker)
        closure = self.waiting.pop_next(worker, beside, is_quiet=is_quiet)
        if closure is None:
            return None
        if isinstance(closure, RunsClosure) and (rest := closure.leave_share(len(self.waiting.workers))):
            self.add_rest(rest)
        attempt = closure.start(worker, cancellation, self.now())
        self.running[attempt] = None
        if not closure.is_internal:
            self.active.add(worker)
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        closure = attempt.closure
        del self.running[attempt]
        self.abandoned.discard(attempt)
        closure.end_attempt(attempt)
        if closure.counts:
            self.uncount(closure)

    def requeue(self, attempt: Attempt, reason: str = "") -> Effects:
        """Ends an attempt without an outcome; puts its closure at the front if it is still wanted."""
        closure = attempt.closure
        self.end_attempt(attempt)
        if closure.has_ended or closure.live:
            return Effects(ended=attempt)
        if self.is_unwanted(closure):
            effects = self.end(closure, CANCELLED, self.unwanted_error(closure))
            effects.ended = attempt
            return effects
        closure.requeue()
        if not closure.is_queued:
            self.waiting.add(closure, at_front=True)
        self.retried += closure.runs
        self.worker_counts[attempt.worker].retried += closure.runs
        return Effects(ended=attempt, is_requeued=True, reason=reason)

    def finish(self, attempts: Sequence[Attempt], results: Sequence[Any]) -> Effects:
        """Decides the closures of a call by their results. Closures that have an outcome stay as they are."""
        effects = Effects()
        cancelled: list[Attempt] = []
        for attempt, result in zip(attempts, results, strict=True):
            closure = attempt.closure
            if closure.state not in ENDS:
                closure.future.worker = attempt.worker
                self.worker_counts[attempt.worker].finished += closure.runs
                if len(closure.live) > 1:
                    cancelled += [other for other in closure.live if other is not attempt]
                self._decide(closure, DONE, result, effects)
        effects.cancelled = cancelled
        return effects

    def decide(
        self, attempt: Attempt, outcome: ClosureState, value: Any, scope: ErrorScope = ErrorScope.FUTURE
    ) -> Effects:
        """Decides the attempt's closure by a result or error, as `end` does, if the closure has no outcome."""
        closure = attempt.closure
        if closure.has_ended:
            return Effects()
        closure.future.worker = attempt.worker
        counts = self.worker_counts[attempt.worker]
        if outcome is DONE:
            counts.finished += closure.runs
        else:
            counts.failed += closure.runs
        return self.end(closure, outcome, value, scope)

    def end(
        self, closure: Closure, outcome: ClosureState, value: Any, scope: ErrorScope = ErrorScope.FUTURE
    ) -> Effects:
        """Decides a closure that has no outcome: DONE, FAILED or CANCELLED.

        The value is the result or error, or None if the user cancelled the closure. The scope says what else the error
        affects; an internal closure's error affects nothing else.
        """
        effects = Effects(cancelled=closure.live)
        self._decide(closure, outcome, value, effects)
        if closure.is_internal or scope is ErrorScope.FUTURE:
            return effects
        if scope is ErrorScope.JOIN:
            self.late_error = self.late_error or value
        elif scope is ErrorScope.END_OF_DATA:
            self.ends[closure.inputs] = value
        else:
            others = self.fail_all(value)
            effects.outcomes += others.outcomes
            effects.cancelled = (*effects.cancelled, *others.cancelled)
        return effects

    def fail_all(self, error: BaseException) -> Effects:
        """If no error is pending, makes `error` pending and cancels all scheduled closures."""
        if self.error is not None or self.stopped:
            return Effects()
        self.error = error
        return self._cancel_all(f"another closure failed ({type(error).__name__})", internal=False)

    def fail_starved(self, worker: int | None, new_error: Callable[[], BaseException], error: BaseException) -> Effects:
        """Fails, with `error`, the closures that no worker can run and whose error `new_error` creates.

        `error` is a result of `new_error`. Closures with a target fail only if `worker` is the target.
        """
        effects = Effects()
        for closure, starved in self.waiting.starved(worker):
            if starved.new_error is not new_error or closure.has_ended:
                continue
            if closure.live:
                self.waiting.remove(closure)
            else:
                effects.outcomes += self.end(closure, FAILED, error, starved.scope).outcomes
        return effects

    def stop(self) -> Effects:
        """Cancels all closures; no closure starts afterwards."""
        self.stopped = True
        return self._cancel_all("the strategy was closed", internal=True)

    def cancel_all(self) -> Effects:
        """Cancels all scheduled closures as if by their user, and drops all errors that would have been raised."""
        self.error = self.late_error = None
        self.ends.clear()
        effects = self._cancel_all(None, internal=False)
        for closure in {attempt.closure: None for attempt in effects.cancelled}:
            if not closure.has_ended:
                effects.outcomes += self.end(closure, CANCELLED, None).outcomes
        return effects

    def abandon(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Stops counting the closures of cancelled attempts that still run; returns these attempts."""
        running = [attempt for attempt in attempts if attempt in self.running]
        for attempt in running:
            self.unsettled -= attempt.closure.counts
            attempt.closure.counts = False
        self.abandoned.update(running)
        return running

    def uncount(self, closure: Closure) -> None:
        """Counts a closure as settled if its future is set and, for a cancelled closure, no attempt of it runs."""
        if closure.counts and closure.is_reported and not (closure.state is CANCELLED and closure.live):
            closure.counts = False
            self.unsettled -= 1

    def record_reported(self, outcomes: Sequence[tuple[Closure, Any]]) -> None:
        """Records that the futures of decided closures are set and their callbacks have returned."""
        for closure, _ in outcomes:
            if closure.counts:
                self.uncount(closure)
            self.under_way.pop(closure, None)

    def take_error(self) -> BaseException | None:
        """Returns and forgets the error to raise now."""
        error = self.error or self.late_error or next(iter(self.ends.values()), None)
        self.error = self.late_error = None
        self.ends.clear()
        return error

    def statistics(self) -> ClusterStatistics:
        """Returns the counts of all closures, without counts of workers."""
        running = {attempt.closure for attempt in self.running}
        return ClusterStatistics(
            waiting=self.waiting.count,
            running=sum(closure.runs for closure in running if closure.counts),
            finished=self._ended[DONE],
            failed=self._ended[FAILED],
            cancelled=self._ended[CANCELLED],
            retried=self.retried,
        )

    def _decide(self, closure: Closure, outcome: ClosureState, value: Any, effects: Effects) -> None:
        """Ends a closure and adds it to the effects. If it has no result, its `RunsFuture`'s other parts end too."""
        if closure.is_queued:
            self.waiting.remove(closure)
        self.under_way[closure] = threading.get_ident()
        closure.end(outcome)
        effects.outcomes.append((closure, value))
        self._ended[outcome] += closure.runs
        if outcome is DONE and not closure.is_internal:
            self.steps += closure.runs
        if isinstance(closure, RunsClosure):
            for other in closure.take_siblings():
                effects.cancelled = (*effects.cancelled, *other.live)
                self._decide(other, CANCELLED, value, effects)

    def _cancel_all(self, reason: str | None, *, internal: bool) -> Effects:
        """Cancels waiting and running closures. `reason` is for the futures' errors; None if the user cancelled."""
        effects = Effects(cancelled=[run for run in self.running if internal or not run.closure.is_internal])
        for closure in list(self.waiting):
            if (closure.is_internal and not internal) or closure.has_ended:
                continue
            if closure.live:
                self.waiting.remove(closure)
            else:
                error = None if reason is None else closure.cancelled_error(reason)
                effects.outcomes += self.end(closure, CANCELLED, error).outcomes
        return effects
