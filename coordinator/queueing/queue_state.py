"""What a closure queue knows: which closures wait, what runs, what was decided, and which error is to be raised.

A plain data structure without a thread or a call to other code: events come in as method calls, and what follows from
them comes out as attempts to run, as workers that wake up, and as `Effects`. `ClosureQueue` guards it and carries out
the effects.

    take ---> idle ---wake, interrupt---> waking ---> takes a closure, or none
                \\----------- timed out ----------------/

Guarantees: a closure wakes one worker, however many are idle; of closures for all workers, each wakes one, but only a
few workers are waking up at a time. The others are woken as these have woken up.
"""

import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.queueing.closure import Attempt, Closure, ClosureState, ErrorScope
from coordinator.queueing.effects import Effects
from coordinator.queueing.run_parts import split_runs, take_siblings
from coordinator.queueing.waiting_closures import IdleWorker, WaitingClosures
from coordinator.runtime import Cancellation, FiniteInput
from coordinator.statistics import ClusterStatistics, WorkerCounts

# A thread that has woken up and waits for the interpreter's lock asks for it every few milliseconds. Hundreds of them
# cost more than the work that they are woken for.
_MAX_WAKING = 4


class QueueState:
    """The state of a `ClosureQueue`.

    Attributes:
      waiting: the closures that wait, for a worker or for arguments.
      idle: the workers that wait for a closure, by index, in the order in which they became idle.
      waking: the workers that were woken and have not taken the queue's lock yet, each with whether it was woken for a
        closure before a quiet period: such a closure has as good as started, and runs before the period begins.
      running: the live attempts.
      abandoned: the live attempts that were cancelled and did not end in time.
      unsettled: how many scheduled closures have no outcome yet, or were cancelled and still run.
      error: the pending error, which cancelled all other closures.
      late_error: an error that is raised once everything is settled.
      ends: errors that are raised likewise if there is no other one: that data has ended, by the inputs of closures.
      paused: why no closure may start; empty if closures may.
      quiet: the periods in which no scheduled closure may start, each with the thread that began it.
      active: the workers that have had a scheduled closure since they last reported that they are idle.
      dismissed: the workers that may start no closure any more.
      stopped: whether no worker may.
      retried: how many attempts were requeued.
      steps: how many runs of scheduled closures have finished.
      worker_counts: what the attempts on each worker came to, by the worker's index.
    """

    def __init__(self) -> None:
        self.waiting = WaitingClosures()
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
        self.dismissed: set[int] = set()
        self.stopped = False
        self.retried = 0
        self.steps = 0
        self.worker_counts: defaultdict[int, WorkerCounts] = defaultdict(WorkerCounts)
        self._ended: Counter[ClosureState] = Counter()

    @property
    def is_settled(self) -> bool:
        """Whether every scheduled closure has its outcome."""
        return self.unsettled == 0

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

        Abandoned attempts do not count, which may never end, nor do their workers, which can start nothing.
        """
        return not (self.active - {attempt.worker for attempt in self.abandoned} or any(self.waking.values())) and all(
            attempt.closure.is_internal or attempt in self.abandoned for attempt in self.running
        )

    def is_over_for(self, worker: int) -> bool:
        """Returns whether a worker will never start a closure again."""
        return self.stopped or worker in self.dismissed

    def is_unwanted(self, closure: Closure) -> bool:
        """Returns whether a closure without an outcome must not be tried again."""
        return self.stopped or (self.error is not None and not closure.is_internal)

    def unwanted_error(self, closure: Closure) -> BaseException:
        """Returns the error for the future of a closure for which `is_unwanted` is True."""
        why = "the strategy was closed" if self.stopped else "another closure failed while it ran"
        return closure.cancelled_error(why)

    def add(self, closure: Closure) -> None:
        """Adds a closure that was scheduled."""
        # In this order: if Ctrl-C comes between, nothing waits for the closure, which is cancelled.
        self.waiting.add(closure)
        if not closure.is_internal:
            closure.counts = True
            self.unsettled += 1

    def unblock(self, closure: Closure) -> None:
        """Records that one of the results that a closure waits for exists."""
        is_last = closure.blockers == 1
        if is_last:
            self.waiting.remove(closure)
        closure.unblock()
        if is_last:
            self.waiting.add(closure)

    def wait(self, worker: int) -> IdleWorker:
        """Adds a worker that begins to wait for a closure."""
        assert worker not in self.idle, f"two threads take for worker {worker}"
        self.idle[worker] = idle = IdleWorker(worker)
        return idle

    def interrupt(self, worker: int) -> None:
        """Wakes a worker without a closure, if it is idle."""
        idle = self.idle.pop(worker, None)
        if idle is not None:
            self.waking[worker] = False
            idle.is_interrupted = True
            idle.wakeup.release()

    def wake(self, worker: int | None = None) -> None:
        """Wakes idle workers that may start a closure: this one, or for None the longest idle, a few at a time."""
        waiting = self.waiting
        woken: Sequence[int] = ()
        if self.paused:
            return
        if worker is not None:
            if worker in self.idle and (waiting.has_internal(worker) if self.quiet else waiting.has_next(worker)):
                woken = (worker,)
        elif not self.quiet:
            able: Iterable[int] = self.idle
            count = len(waiting.for_all)
            if waiting.apart:
                able = (each for each in self.idle if waiting.has_next(each))
                count += sum(map(len, waiting.apart.values()))
            woken = tuple(itertools.islice(able, max(0, min(count, _MAX_WAKING) - len(self.waking))))
        for index in woken:
            idle = self.idle[index]
            # Nothing is called between these lines, so Ctrl-C does not come between them.
            del self.idle[index]
            self.waking[index] = not self.quiet
            idle.wakeup.release()

    def wake_all(self) -> None:
        """Wakes the idle workers that may start a closure, after none could."""
        for worker in list(self.idle):
            if self.waiting.waiting_for(worker):
                self.wake(worker)
        self.wake()

    def start_next(self, worker: int, cancellation: Cancellation, beside: Closure | None = None) -> Attempt | None:
        """Starts the next closure that a worker may start; returns None if there is none.

        Args:
          worker: the worker's index.
          cancellation: of the attempt.
          beside: starts one of those among which this closure, for all workers, has waited; None for any.
        """
        if self.paused or self.stopped or worker in self.dismissed:
            return None
        is_quiet = bool(self.quiet) and not self.waking.get(worker)
        closure = self.waiting.pop_next(worker, beside, is_quiet=is_quiet)
        if closure is None:
            return None
        if closure.future.whole is not None and (rest := split_runs(closure, len(self.waiting.inputs.workers))):
            self.add_rest(rest)
        attempt = closure.start(worker, cancellation)
        self.running[attempt] = None
        if not closure.is_internal:
            self.active.add(worker)
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """Records that an attempt ended."""
        del self.running[attempt]
        self.abandoned.discard(attempt)
        attempt.closure.end_attempt(attempt)
        self.uncount(attempt.closure)

    def requeue(self, attempt: Attempt, reason: str = "") -> Effects:
        """Ends an attempt without an outcome, and puts its closure at the front unless it is not wanted any more."""
        closure = attempt.closure
        self.end_attempt(attempt)
        if closure.has_ended or closure.live:
            return Effects(ended=attempt)
        if self.is_unwanted(closure):
            effects = self.end(closure, ClosureState.CANCELLED, self.unwanted_error(closure))
            effects.ended = attempt
            return effects
        closure.requeue()
        if not closure.is_queued:
            self.waiting.add(closure, at_front=True)
        self.retried += closure.runs
        self.worker_counts[attempt.worker].retried += closure.runs
        return Effects(ended=attempt, is_requeued=True, reason=reason)

    def finish(self, attempts: Sequence[Attempt], results: Sequence[Any]) -> Effects:
        """Decides the closures of a call by their results; see `decide`."""
        outcomes, cancelled = [], []
        for attempt, result in zip(attempts, results, strict=True):
            effects = self.decide(attempt, ClosureState.DONE, result)
            outcomes += effects.outcomes
            cancelled += [other for other in effects.cancelled if other is not attempt]
        return Effects(outcomes, cancelled)

    def decide(
        self, attempt: Attempt, state: ClosureState, value: Any, scope: ErrorScope = ErrorScope.FUTURE
    ) -> Effects:
        """Decides a closure by an attempt's result or error (see `end`), unless it was decided already."""
        if attempt.closure.has_ended:
            return Effects()
        attempt.closure.future.worker = attempt.worker
        counts = self.worker_counts[attempt.worker]
        if state is ClosureState.DONE:
            counts.finished += attempt.closure.runs
        else:
            counts.failed += attempt.closure.runs
        return self.end(attempt.closure, state, value, scope)

    def end(self, closure: Closure, state: ClosureState, value: Any, scope: ErrorScope = ErrorScope.FUTURE) -> Effects:
        """Decides a closure that has no outcome.

        Args:
          closure: the closure.
          state: DONE, FAILED or CANCELLED.
          value: its result or error, or None if its user cancelled it.
          scope: what the error affects besides; nothing if the closure is internal.
        """
        effects = Effects([(closure, value)], closure.live)
        self._end(closure, state)
        for other in take_siblings(closure):
            effects.outcomes.append((other, value))
            effects.cancelled = (*effects.cancelled, *other.live)
            self._end(other, ClosureState.CANCELLED)
        if closure.is_internal or scope is ErrorScope.FUTURE:
            return effects
        if scope is ErrorScope.JOIN:
            self.late_error = self.late_error or value
            return effects
        if scope is ErrorScope.END_OF_DATA:
            self.ends[closure.inputs] = value
            return effects
        others = self.fail_all(value)
        effects.outcomes += others.outcomes
        effects.cancelled = (*effects.cancelled, *others.cancelled)
        return effects

    def fail_all(self, error: BaseException) -> Effects:
        """Makes an error pending, which cancels all scheduled closures; does nothing if there is one already."""
        if self.error is not None or self.stopped:
            return Effects()
        self.error = error
        return self._cancel_all(f"another closure failed ({type(error).__name__})", internal=False)

    def stop(self) -> Effects:
        """Cancels everything; nothing starts any more."""
        self.stopped = True
        return self._cancel_all("the strategy was closed", internal=True)

    def cancel_all(self) -> Effects:
        """Cancels all scheduled closures as their user does, and forgets the errors that were to be raised."""
        self.error = self.late_error = None
        self.ends.clear()
        effects = self._cancel_all(None, internal=False)
        for closure in {attempt.closure: None for attempt in effects.cancelled}:
            if not closure.has_ended:
                effects.outcomes += self.end(closure, ClosureState.CANCELLED, None).outcomes
        return effects

    def abandon(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Stops counting the cancelled closures of those attempts that still run, and returns these attempts."""
        running = [attempt for attempt in attempts if attempt in self.running]
        for attempt in running:
            self.unsettled -= attempt.closure.counts
            attempt.closure.counts = False
        self.abandoned.update(running)
        return running

    def uncount(self, closure: Closure) -> None:
        """Stops counting a closure as unsettled, once its future is set; a cancelled one once it does not run."""
        is_over = closure.has_ended and closure.future.done()
        if closure.counts and is_over and not (closure.state is ClosureState.CANCELLED and closure.live):
            closure.counts = False
            self.unsettled -= 1

    def take_error(self) -> BaseException | None:
        """Returns the error to be raised now, and forgets it."""
        error = self.error or self.late_error or next(iter(self.ends.values()), None)
        self.error = self.late_error = None
        self.ends.clear()
        return error

    def statistics(self) -> ClusterStatistics:
        """Returns the counts, without the workers'."""
        return ClusterStatistics(
            waiting=self.waiting.count,
            running=sum(each.runs for each in {attempt.closure for attempt in self.running} if each.counts),
            finished=self._ended[ClosureState.DONE],
            failed=self._ended[ClosureState.FAILED],
            cancelled=self._ended[ClosureState.CANCELLED],
            retried=self.retried,
        )

    def add_rest(self, rest: Closure) -> None:
        """Adds the closure of the remaining runs after a worker has taken its part."""
        rest.counts = True
        self.unsettled += 1
        self.waiting.add(rest, at_front=True)

    def _end(self, closure: Closure, state: ClosureState) -> None:
        self.waiting.remove(closure)
        closure.end(state)
        self._ended[state] += closure.runs
        if state is ClosureState.DONE and not closure.is_internal:
            self.steps += closure.runs

    def _cancel_all(self, reason: str | None, *, internal: bool) -> Effects:
        """Cancels what waits and what runs.

        Args:
          reason: for the error of the futures; None if the user cancelled.
          internal: also internal closures.
        """
        effects = Effects(cancelled=[run for run in self.running if internal or not run.closure.is_internal])
        for closure in list(self.waiting):
            if (closure.is_internal and not internal) or closure.has_ended:
                continue
            if closure.live:
                self.waiting.remove(closure)
            else:
                error = None if reason is None else closure.cancelled_error(reason)
                effects.outcomes += self.end(closure, ClosureState.CANCELLED, error).outcomes
        return effects
