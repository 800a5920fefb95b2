r"""One scheduled function call: its states, its attempts, and the future that reports its outcome.

              unblock               start                result
    BLOCKED ---------> WAITING ----------------> RUNNING -------> DONE
       |                |   ^                     |  |  \-------> FAILED    error
       |                |   \----- requeue -------/  |
       |                |      (worker lost, ...)    |
       \----------------\------> CANCELLED, FAILED <-/

A closure is blocked while it waits for other closures' results that are its arguments. While it runs it has one live
attempt, or several if it exceeded its timeout and was started on another worker too; the first attempt that ends
decides the outcome. It is requeued when its last live attempt ends without an outcome.

Guarantee: the state changes only along these arrows; anything else raises `InvalidTransitionError` with the history.

The result of many runs of one function, before all of them have ended.

    RunsFuture    0 1 2 | 3 4 5 6 | 7 8     steps = 9, completed = 3
    RunsPart      done    running   waits   each in place of the future of a closure

The runs are divided while they run: a worker takes those of one call from those that wait. So all workers end at about
the same time, and only the runs of a call that failed are retried.

How many runs of one closure are divided into parts: closures of consecutive runs with one `RunsFuture`.

    waits              8 runs
    a worker starts    4 runs | 4 runs             a share of them
    its call begins    0 1 | 6 runs                as many as it is to make; they have numbers now
    the call is lost   0 1 | 2 3 | 4 runs          these two wait again, to run one by one; 2 3 run elsewhere

Functions of closures; after `prepare` they are called with the queue's lock held.
"""

import dataclasses
import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.events.event_stream import EventStream, Kind
from coordinator.future import Future
from coordinator.runtime import Cancellation, FailureKind, FiniteInput, FusionKey


class RunsFuture(Future):
    """A `Future` of many runs of one function with the same arguments.

    `result()` has each output of all runs, stacked along a new first axis in the order of the runs. It raises the
    error of the first run that fails, which cancels the others. `cancel()` cancels all runs that have not ended.

    Args:
      name: the function's name.
      number: the place in the order of scheduling.
      steps: the number of runs.
      concatenated: joins stacked results of consecutive runs.
      origin: the `TracedFunction` that was scheduled; identifies futures of this strategy and gives the result's specs.

    Attributes:
      steps: as given.
      fusion_key: of runs that were not tried before; None if each is a separate call. Set by the queue.
      parts: the closures whose runs have not ended, in order of creation.
      rest: the one of them whose runs no worker has taken; None if there is none.
      begun: how many runs have begun, those that are made again counted once. The queue's lock guards these three.
    """

    __slots__ = (
        *("_completed", "_concatenated", "_is_discarded", "_is_over", "_lock", "_results"),
        *("begun", "fusion_key", "parts", "rest", "steps"),
    )

    def __init__(
        self,
        name: str,
        number: int,
        steps: int,
        concatenated: Callable[[Sequence[Any]], Any],
        origin: Any = None,
    ) -> None:
        super().__init__(name, number, origin=origin)
        self.steps = steps
        self.fusion_key: FusionKey | None = None
        self.parts: dict[Any, None] = {}
        self.rest: Any = None
        self.begun = 0
        self._concatenated = concatenated
        # A leaf lock; guards what follows.
        self._lock = threading.Lock()
        self._results: list[tuple[int, Any]] = []
        self._completed = 0
        self._is_over = self._is_discarded = False

    @property
    def completed(self) -> int:
        """How many runs have a result."""
        return self._completed

    def discard(self) -> None:
        """Drops the results, now and later, since nothing is going to use them: `result()` returns None."""
        with self._lock:
            self._is_discarded = True
            self._results.clear()

    # The methods that follow are for the parts.

    def add(self, first: int, count: int, result: Any) -> None:
        """Adds the stacked results of `count` runs; `first` is the number of the first of them, from 0 on."""
        with self._lock:
            if self._is_over:
                return
            if not self._is_discarded:
                self._results.append((first, result))
            self._completed += count
            if self._completed < self.steps:
                return
            self._is_over = True
        if self._is_discarded:
            self.set_result(None)
            return
        self._results.sort(key=lambda each: each[0])
        try:
            result = self._concatenated([each for _, each in self._results])
        except Exception as error:  # noqa: BLE001 - raised by result()
            self.set_exception(error)
        else:
            self.set_result(result)
        self._results.clear()

    def end(self, error: BaseException | None) -> None:
        """Ends it with an error, or as cancelled by its user if that is None; does nothing if it has ended."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._results.clear()
        if error is None:
            self.set_cancelled()
        else:
            self.set_exception(error)


class RunsPart:
    """Consecutive runs of a `RunsFuture` that one closure makes; takes the place of the closure's future.

    Args:
      whole: the future.
      runs: how many there are.
      first: the number of the first run, from 0 on; -1 until they begin.

    Attributes:
      whole, first, runs: as given; the queue changes the last two, under its lock.
    """

    __slots__ = ("_is_done", "first", "runs", "whole")

    def __init__(self, whole: RunsFuture, runs: int, first: int = -1) -> None:
        self.whole = whole
        self.runs = runs
        self.first = first
        self._is_done = False

    # The same as of a `Future`.

    @property
    def is_started(self) -> bool:
        """Whether a worker has begun any of the runs."""
        return self.whole.is_started

    @is_started.setter
    def is_started(self, value: bool) -> None:
        self.whole.is_started |= value

    @property
    def worker(self) -> int | None:
        """The index of the worker that began runs, or ended some, last."""
        return self.whole.worker

    @worker.setter
    def worker(self, value: int) -> None:
        self.whole.worker = value

    @property
    def attempts(self) -> int:
        """How many attempts there were of the runs that were attempted most often."""
        return self.whole.attempts

    @attempts.setter
    def attempts(self, value: int) -> None:
        self.whole.attempts = max(self.whole.attempts, value)

    def done(self) -> bool:
        """Returns whether its outcome was set."""
        return self._is_done

    def set_result(self, result: Any) -> None:
        """Sets the stacked results of its runs."""
        self.whole.add(self.first, self.runs, result)
        self._is_done = True

    def set_exception(self, exception: BaseException) -> None:
        """Sets the error with which one of its runs, or of those of another part, has ended."""
        self.whole.end(exception)
        self._is_done = True

    def set_cancelled(self) -> None:
        """Records that the user cancelled the runs."""
        self.whole.end(None)
        self._is_done = True


class ErrorScope(enum.Enum):
    """What a closure's error affects."""

    ALL_CLOSURES = "cancels all other closures, and join raises it"
    JOIN = "leaves the other closures alone, and join raises it"
    END_OF_DATA = "leaves the other closures alone, and join raises it if there is no other error"
    FUTURE = "is raised by the closure's future only"


class ClosureState(enum.Enum):
    """Where a closure is between `schedule` and its result."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({ClosureState.DONE, ClosureState.FAILED, ClosureState.CANCELLED})

# Shared by all closures that were never lost.
_NOWHERE: frozenset[int] = frozenset()

_ALLOWED = {
    ClosureState.BLOCKED: {ClosureState.WAITING, ClosureState.FAILED, ClosureState.CANCELLED},
    ClosureState.WAITING: {ClosureState.RUNNING, ClosureState.FAILED, ClosureState.CANCELLED},
    # RUNNING again: a further attempt beside a slow one.
    ClosureState.RUNNING: {ClosureState.RUNNING, ClosureState.WAITING, *_ENDS},
    ClosureState.DONE: set[ClosureState](),
    ClosureState.FAILED: set[ClosureState](),
    ClosureState.CANCELLED: set[ClosureState](),
}


def shared_cancellations(call: Cancellation, count: int) -> Sequence[Cancellation]:
    """Returns one cancellation for each of `count` attempts in a call, which is cancelled once all of them are."""
    # A leaf lock: nothing is called while it is held.
    lock = threading.Lock()
    active: set[_CallMember] = set()
    members = tuple(_CallMember(call, lock, active) for _ in range(count))
    active.update(members)
    return members


class _CallMember:
    """Implements `coordinator.runtime.Cancellation` for one attempt of a fused call.

    Args:
      call: cancels the call.
      lock: guards `active`.
      active: those of the call that are not cancelled.
    """

    def __init__(self, call: Cancellation, lock: threading.Lock, active: set["_CallMember"]) -> None:
        self._call = call
        self._lock = lock
        self._active = active

    def cancel(self) -> None:
        """Cancels this attempt, and the call if it was the last one. Calling it again does nothing."""
        with self._lock:
            was_last = self._active == {self}
            self._active.discard(self)
        if was_last:
            self._call.cancel()


class Attempt:
    """One run of a closure on a worker.

    Attributes:
      work: its work, referenced here too because a closure drops its own once it has an outcome.
      worker: the worker's index.
      number: 1 for the closure's first attempt.
      cancellation: cancels this attempt only.
      call_cancellation: cancels the call in which it runs, with all other attempts in that call.
      started: when it started, in seconds of the `time.monotonic` clock.
    """

    __slots__ = ("call_cancellation", "cancellation", "closure", "number", "started", "work", "worker")

    def __init__(self, closure: "Closure", worker: int, cancellation: Cancellation) -> None:
        self.closure = closure
        self.work = closure.work
        self.worker = worker
        self.number = closure.attempts
        self.cancellation = self.call_cancellation = cancellation
        self.started = time.monotonic()

    def __repr__(self) -> str:
        return f"attempt {self.number} of {self.closure} on worker {self.worker}"


class Closure:
    """A function call for a worker, or several in a row of the same function and arguments, and its future.

    Args:
      work: what the runtime runs; opaque to the core.
      name: the function's name, for messages.
      number: the place in the order of scheduling.
      future: reports the outcome; if the closure is a part of many runs, to their common future.
      target: the index of the only worker that may run it, or None for any.
      timeout: an attempt that takes longer, in seconds, is started on another worker too; None for no limit.
      is_internal: whether the library scheduled it for itself: neither `join` nor another closure's error affects it.
      blockers: how many results it waits for before it may run.

    Attributes:
      fusion_key: closures with equal keys may run in one call; None if it runs alone, as it does unless this is set
        before it is queued. Dropped when it is requeued, so that a closure that was tried before runs alone.
      inputs: what it takes of data that may end; set before it is queued.
      attempts: how many attempts were started.
      failures: the worker and kind of each attempt that has failed.
      lost_on: the workers that were lost while they ran it. They run it again only if no other worker can.
      needs_another: whether it waits even for a worker that is away now, rather than run on those of `lost_on`.
      live: the attempts that run now.
      waiting_since: when it last began to wait for a worker, in seconds of the `time.monotonic` clock.
      is_queued: whether it is in one of the queue's deques, or blocked. Set by the queue's state.
      counted: how many of its runs are counted as waiting. Set by the queue's state.
      counts: whether `join` still has to wait for it. Set by the queue's state.
    """

    __slots__ = (
        "_state",
        "attempts",
        "blockers",
        "counted",
        "counts",
        "failures",
        "fusion_key",
        "future",
        "inputs",
        "is_internal",
        "is_queued",
        "live",
        "lost_on",
        "name",
        "needs_another",
        "number",
        "target",
        "timeout",
        "waiting_since",
        "work",
    )

    def __init__(
        self,
        work: Any,
        name: str,
        number: int,
        future: Future | RunsPart,
        *,
        target: int | None = None,
        timeout: float | None = None,
        is_internal: bool = False,
        blockers: int = 0,
    ) -> None:
        self.work = work
        self.name = name
        self.number = number
        self.future = future
        self.target = target
        self.timeout = timeout
        self.is_internal = is_internal
        self.blockers = blockers
        self.inputs: tuple[FiniteInput, ...] = ()
        self.fusion_key: FusionKey | None = None
        self.is_queued = self.counts = False
        self.attempts = self.counted = 0
        self.live: tuple[Attempt, ...] = ()
        self.waiting_since = time.monotonic()
        self._state = ClosureState.BLOCKED if blockers else ClosureState.WAITING
        self.failures: tuple[tuple[int, FailureKind], ...] = ()
        self.lost_on: frozenset[int] = _NOWHERE
        self.needs_another = False

    @property
    def state(self) -> ClosureState:
        """Where the closure is now."""
        return self._state

    @property
    def runs(self) -> int:
        """How many runs it is to make."""
        return self.future.runs

    @property
    def whole(self) -> RunsFuture | None:
        """The future of the many runs of which it is a part, if it is one."""
        return self.future.whole

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is decided."""
        return self._state in _ENDS

    def unblock(self) -> None:
        """Records that one of the results that it waits for exists; after the last of them it may run."""
        self.blockers -= 1
        if not self.blockers:
            self._change(ClosureState.WAITING)
            self.waiting_since = time.monotonic()

    def start(self, worker: int, cancellation: Cancellation) -> Attempt:
        """Starts an attempt: the first, or one more beside a slow one."""
        self._change(ClosureState.RUNNING)
        self.attempts += 1
        attempt = Attempt(self, worker, cancellation)
        self.live += (attempt,)
        future = self.future
        future.is_started, future.worker, future.attempts = True, worker, self.attempts
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """Removes an attempt that ended, with or without an outcome, from the live ones."""
        self.live = () if self.live == (attempt,) else tuple(other for other in self.live if other is not attempt)

    def requeue(self) -> None:
        """Makes it wait again, since its last attempt ended without an outcome."""
        self._change(ClosureState.WAITING)
        self.waiting_since = time.monotonic()
        self.fusion_key = None
        self.future.is_started = False

    def end(self, state: ClosureState) -> None:
        """Decides its outcome; `report` and `release_work` must follow."""
        self._change(state)

    def report(self, value: Any) -> None:
        """Sets the future. Must be called without a lock: futures have callbacks.

        Args:
          value: the result or the error, by the state; None if its user cancelled it.
        """
        if self._state is ClosureState.DONE:
            self.future.set_result(value)
        elif value is None:
            self.future.set_cancelled()
        else:
            self.future.set_exception(value)

    def release_work(self) -> None:
        """Drops the work. Must be called without a lock: arguments may have destructors that users wrote."""
        self.work = None

    def record_failure(self, worker: int, kind: FailureKind) -> int:
        """Records a failed attempt; returns how many attempts failed in this way so far."""
        self.failures += ((worker, kind),)
        if kind is FailureKind.WORKER_LOST:
            self.lost_on |= {worker}
        return sum(past is kind for _, past in self.failures)

    def cancelled_error(self, reason: str) -> ClosureCancelledError:
        """Returns the error for the future of this closure when the queue cancels it."""
        return ClosureCancelledError(f"{self} was cancelled because {reason}. Please reschedule it if it is needed.")

    def history(self) -> str:
        """Describes the failed attempts, in order."""
        if not self.failures:
            return "no attempt has failed"
        return "; ".join(f"attempt {i} on worker {w}: {k.value}" for i, (w, k) in enumerate(self.failures, 1))

    def _change(self, state: ClosureState) -> None:
        if state not in _ALLOWED[self._state]:
            raise InvalidTransitionError(
                f"{self} cannot go from {self._state.value} to {state.value} ({self.history()}). "
                "This is a defect of coordinator; please report it with this message."
            )
        self._state = state

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"


_KINDS: dict[str, Kind] = {
    ClosureState.DONE.value: "closures_finished",
    ClosureState.FAILED.value: "closures_failed",
    ClosureState.CANCELLED.value: "closures_cancelled",
}


@dataclasses.dataclass(slots=True)
class Effects:
    """What is to be done.

    Attributes:
      outcomes: the closures that were decided, in the order in which their futures are to be set, each with its result,
        or its error, or None if its user cancelled it.
      cancelled: the attempts to be cancelled.
      ended: the attempt that has ended without a result, if one has.
      is_requeued: whether its closure waits again.
      reason: why.
    """

    outcomes: list[tuple[Closure, Any]] = dataclasses.field(default_factory=list)
    cancelled: Sequence[Attempt] = ()
    ended: Attempt | None = None
    is_requeued: bool = False
    reason: str = ""

    def record(self, events: EventStream, call: Sequence[Attempt]) -> None:
        """Records what was decided, and the end of a call.

        Args:
          events: where.
          call: the attempts of the call that has ended with it, if one has.
        """
        attempt, others = call[0] if call else self.ended, self.outcomes
        if attempt is not None:
            count = attempt.closure.runs
            if self.is_requeued:
                kind: Kind = "closures_retried"
            elif others and others[0][0].state is ClosureState.DONE:
                kind, count, others = "closures_finished", sum(each.runs for each, _ in others), []
            elif others and others[0][0] is attempt.closure:
                kind, self.reason = _KINDS[others[0][0].state.value], type(others[0][1]).__name__
                others = others[1:]
            else:
                # What it ran was decided before.
                kind, count = "closures_cancelled", 0
            seconds = time.monotonic() - attempt.started
            events.record(kind, f"worker {attempt.worker}", attempt.closure.name, count, seconds, self.reason)
        if others:
            counts: Counter[tuple[Kind, str]] = Counter()
            for each, _ in others:
                counts[_KINDS[each.state.value], each.name] += each.runs
            for (kind, name), count in counts.items():
                events.record(kind, name=name, count=count)


def prepare(closure: Closure, fusion_key: FusionKey | None) -> None:
    """Prepares a closure for many runs, before it is queued.

    Args:
      closure: the closure.
      fusion_key: of its work; None if each run is a separate call.
    """
    whole = closure.whole
    assert whole is not None
    whole.parts[closure] = None
    whole.rest = closure
    if fusion_key is not None and closure.timeout is None:
        # Another one than that of single runs, which are not gathered with these.
        closure.fusion_key = whole.fusion_key = FusionKey(fusion_key.function, object())


def split_runs(closure: Closure, workers: int) -> Closure | None:
    """Leaves a closure that a worker is about to start a share of its runs, as large as that of any other worker.

    Args:
      closure: waited.
      workers: how many workers there are.

    Returns:
      A new closure of the other runs; None if there are none.
    """
    whole = closure.whole
    if whole is None or whole.rest is not closure:
        return None
    whole.rest = None
    if closure.target is not None:
        return None
    return _split(closure, 1 if closure.timeout is not None else -(-closure.runs // max(workers, 1)))


def available(attempt: Attempt) -> int:
    """Returns how many runs an attempt may make: those of its closure, and those that no worker has taken."""
    closure, whole = attempt.closure, attempt.closure.whole
    if whole is None or whole.rest is None or _is_numbered(closure) or closure.timeout is not None:
        return closure.runs
    return closure.runs + int(whole.rest.runs)


def number(attempt: Attempt, count: int) -> Closure | None:
    """Gives the first runs of a closure, at most as many as are `available`, their numbers, as their call begins.

    Args:
      attempt: makes these runs.
      count: how many.

    Returns:
      The closure of the runs that are left, which has become larger or smaller unless it is a new one; None if there
      is none, or the numbers were given to an earlier attempt.
    """
    closure, part = attempt.closure, attempt.closure.future
    assert isinstance(part, RunsPart)
    if _is_numbered(closure):
        others = _split(closure, count)
        if others is not None:
            # They were in the same attempts before this one.
            others.attempts, others.failures = attempt.number - 1, closure.failures
            others.lost_on, others.needs_another = closure.lost_on, closure.needs_another
        return others
    part.first = part.whole.begun
    part.whole.begun += count
    rest: Closure | None = part.whole.rest
    if rest is None or part.runs == count:
        return _split(closure, count)
    assert isinstance(rest.future, RunsPart)
    rest.future.runs += part.runs - count
    part.runs = count
    if not rest.runs:
        part.whole.rest = None
        del part.whole.parts[rest]
    return rest


def _is_numbered(closure: Closure) -> bool:
    return isinstance(closure.future, RunsPart) and closure.future.first >= 0


def _split(closure: Closure, at: int) -> Closure | None:
    """Leaves a closure its first `at` runs; returns a new one of the others, if there are any."""
    part = closure.future
    assert isinstance(part, RunsPart)
    if at >= part.runs:
        return None
    is_numbered = _is_numbered(closure)
    others = RunsPart(part.whole, part.runs - at, part.first + at if is_numbered else -1)
    part.runs = at
    rest = Closure(closure.work, closure.name, closure.number, others, target=closure.target, timeout=closure.timeout)
    rest.inputs, rest.fusion_key = closure.inputs, closure.fusion_key
    part.whole.parts[rest] = None
    if not is_numbered:
        part.whole.rest = rest
    return rest


def take_siblings(closure: Closure) -> Sequence[Closure]:
    """Returns the other parts of the same runs, which end with a closure that has just ended; none if it is done."""
    if closure.whole is None:
        return ()
    parts = closure.whole.parts
    parts.pop(closure, None)
    if closure.state is ClosureState.DONE:
        return ()
    siblings = tuple(parts)
    parts.clear()
    return siblings
