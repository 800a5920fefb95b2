r"""One scheduled function call: its states, its attempts, and the future that reports its outcome.

              unblock               start                result
    BLOCKED ---------> WAITING ----------------> RUNNING -------> DONE
       |                |   ^                     |  |  \-------> FAILED    error
       |                |   \----- requeue -------/  |
       |                |      (worker lost, ...)    |
       \----------------\------> CANCELLED, FAILED <-/

A blocked closure waits for other closures' results that are its arguments. A running closure has one live attempt, or
several if the closure exceeded its timeout and was started on another worker too. The first attempt with an outcome
decides the closure. When the last live attempt ends without an outcome, the closure is requeued.

Guarantee: the state changes only along these arrows; any other change raises `InvalidTransitionError` with the history.

A function that runs many times has one `RunsFuture` and several closures, called parts, of consecutive runs. Runs are
divided when workers take them, so all workers end almost together, and only a failed call's runs are repeated:

    waiting            8 runs
    a worker starts    4 runs | 4 runs             the closure keeps the worker's share
    its call begins    0 1 | 6 runs                the call's runs now have numbers
    the call is lost   0 1 | 2 3 | 4 runs          0 1 wait again, to run one by one; 2 3 run elsewhere
"""

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.events.event_stream import EventStream, Kind
from coordinator.future import Future
from coordinator.runtime import Cancellation, FailureKind, FiniteInput, FusionKey


class ErrorScope(enum.Enum):
    """What a closure's error affects."""

    ALL_CLOSURES = "cancels all other closures, and join raises it"
    JOIN = "leaves the other closures as they are, and join raises it"
    END_OF_DATA = "leaves the other closures as they are, and join raises it if there is no other error"
    FUTURE = "is raised by the closure's future only"


class ClosureState(enum.Enum):
    """The state of a closure between `schedule` and its result."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    # `Enum.__hash__` is a Python function, and each closure looks up the tables below several times.
    __hash__ = object.__hash__


# These names are for speed: reading a member from its class takes ten times as long.
BLOCKED, WAITING, RUNNING = ClosureState.BLOCKED, ClosureState.WAITING, ClosureState.RUNNING
DONE, FAILED, CANCELLED = ClosureState.DONE, ClosureState.FAILED, ClosureState.CANCELLED

# (state, event) -> state. An outcome is an event too.
_TRANSITIONS: dict[tuple[ClosureState, str | ClosureState], ClosureState] = {
    (BLOCKED, "unblock"): WAITING,
    (BLOCKED, FAILED): FAILED,
    (BLOCKED, CANCELLED): CANCELLED,
    (WAITING, "start"): RUNNING,
    (WAITING, FAILED): FAILED,
    (WAITING, CANCELLED): CANCELLED,
    # A closure that exceeded its timeout starts one more attempt on another worker.
    (RUNNING, "start"): RUNNING,
    (RUNNING, "requeue"): WAITING,
    (RUNNING, DONE): DONE,
    (RUNNING, FAILED): FAILED,
    (RUNNING, CANCELLED): CANCELLED,
}

ENDS = frozenset({DONE, FAILED, CANCELLED})


class RunsFuture(Future):
    """A `Future` of many runs of one function with the same arguments.

    `result()` has each output of all runs, stacked along a new first axis in the order of the runs. `result()` raises
    the first error of a run, which cancels the other runs. `cancel()` cancels all runs that have not ended.

    Args:
      name: the function's name.
      number: the place in the order of scheduling.
      steps: the number of runs.
      concatenated: a function that joins the stacked results of consecutive runs.
      origin: the `TracedFunction` that was scheduled; identifies futures of this strategy and gives the result's specs.

    Attributes:
      steps: the number of runs.
      fusion_key: the key of runs that were not tried before; None if each run is a separate call. Set by the queue.
      parts: the closures whose runs have not ended, oldest first. The queue's lock guards `parts`, `rest` and `begun`.
      rest: the part whose runs no worker has taken; None if there is none.
      begun: how many runs have begun; a repeated run counts once.
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
        self.parts: dict[RunsClosure, None] = {}
        self.rest: RunsClosure | None = None
        self.begun = 0
        self._concatenated = concatenated
        # A leaf lock, which guards the following attributes.
        self._lock = threading.Lock()
        self._results: list[tuple[int, Any]] = []
        self._completed = 0
        self._is_over = self._is_discarded = False

    @property
    def completed(self) -> int:
        """How many runs have a result."""
        return self._completed

    def discard(self) -> None:
        """Drops present and later results, because nothing will use them. `result()` then returns None."""
        with self._lock:
            self._is_discarded = True
            self._results.clear()

    # The following methods are for the closures.

    def add(self, first: int, count: int, result: Any) -> None:
        """Adds the stacked results of `count` consecutive runs; `first` is the number of the first run, from 0."""
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
        self._results.sort(key=lambda numbered: numbered[0])
        try:
            result = self._concatenated([result for _, result in self._results])
        except Exception as error:  # noqa: BLE001 - raised by result()
            self.set_exception(error)
        else:
            self.set_result(result)
        self._results.clear()

    def end(self, error: BaseException | None) -> None:
        """If the future has not ended, ends it with `error`, or as cancelled by the user if `error` is None."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._results.clear()
        if error is None:
            self.set_cancelled()
        else:
            self.set_exception(error)


def shared_cancellations(call: Cancellation, count: int) -> Sequence[Cancellation]:
    """Returns `count` cancellations, one for each attempt in a call. Cancelling all of them cancels the call."""
    # A leaf lock: nothing is called while it is held.
    lock = threading.Lock()
    active: set[_CallMember] = set()
    members = tuple(_CallMember(call, lock, active) for _ in range(count))
    active.update(members)
    return members


class _CallMember:
    """The cancellation of one attempt of a fused call. The lock guards `active`, the members that are not cancelled."""

    def __init__(self, call: Cancellation, lock: threading.Lock, active: set["_CallMember"]) -> None:
        self._call = call
        self._lock = lock
        self._active = active

    def cancel(self) -> None:
        """Cancels this attempt; the last attempt cancels the call. A second `cancel` of an attempt does nothing."""
        with self._lock:
            was_last = self._active == {self}
            self._active.discard(self)
        if was_last:
            self._call.cancel()


class Attempt:
    """One run of a closure on a worker.

    Attributes:
      work: the closure's work. The closure itself drops the work when it has an outcome.
      number: 1 for the closure's first attempt.
      cancellation: cancels only this attempt.
      call_cancellation: cancels the attempt's call, with all other attempts in it.
      started: when the attempt started, in seconds of the queue's clock.
    """

    __slots__ = ("call_cancellation", "cancellation", "closure", "number", "started", "work", "worker")

    def __init__(self, closure: "Closure", worker: int, cancellation: Cancellation, started: float) -> None:
        self.closure = closure
        self.work = closure.work
        self.worker = worker
        self.number = closure.attempts
        self.cancellation = self.call_cancellation = cancellation
        self.started = started

    def __repr__(self) -> str:
        return f"attempt {self.number} of {self.closure} on worker {self.worker}"


class Closure:
    """A function call for a worker, and its future. Millions of closures may wait, and each slot costs 8 bytes.

    Args:
      work: what the runtime runs; opaque to the core.
      name: the function's name, for messages.
      number: the place in the order of scheduling.
      future: the future that reports the outcome.
      target: the index of the only worker that may run the closure, or None for any worker.
      timeout: an attempt that takes longer, in seconds, is started on another worker too; None for no limit.
      is_internal: whether the library scheduled the closure for its own use. `join` does not wait for an internal
        closure, and the error of another closure does not cancel it.
      blockers: how many results of other closures must exist before this closure may run.

    Attributes:
      runs: how many runs the closure makes. Guarded by the queue's lock.
      whole: the `RunsFuture` to which the closure belongs; None if the closure makes one run.
      is_reported: whether the closure's future was set.
      fusion_key: closures with equal keys may run in one call; None for a closure that runs alone. Set before the
        closure is queued. Requeueing drops the key, so a closure that was tried before runs alone.
      inputs: the closure's inputs that may end. Set before the closure is queued.
      attempts: how many attempts were started.
      failures: the worker and kind of each failed attempt.
      needs_another: whether the closure waits for a worker outside `lost_on`, even if all such workers are away now.
      live: the attempts that run now.
      waiting_since: when the closure last began to wait for a worker, in seconds of the queue's clock. Set by the
        queue's state.
      is_queued: whether the closure is blocked or in one of the queue's deques. Set by the queue's state.
      counted: how many of the closure's runs are counted as waiting. Set by the queue's state.
      counts: whether `join` still has to wait for the closure. Set by the queue's state.
    """

    __slots__ = (
        *("attempts", "blockers", "counted", "counts", "failures", "fusion_key", "future", "inputs", "is_internal"),
        *("is_queued", "is_reported", "live", "name", "needs_another", "number", "state", "target", "timeout"),
        *("waiting_since", "work"),
    )

    runs: int = 1
    whole: RunsFuture | None = None

    def __init__(
        self,
        work: Any,
        name: str,
        number: int,
        future: Future,
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
        self.is_queued = self.counts = self.is_reported = self.needs_another = False
        self.attempts = self.counted = 0
        self.live: tuple[Attempt, ...] = ()
        self.waiting_since = 0.0
        self.state = BLOCKED if blockers else WAITING
        self.failures: tuple[tuple[int, FailureKind], ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the closure's outcome is decided."""
        return self.state in ENDS

    @property
    def lost_on(self) -> frozenset[int]:
        """The workers that were lost while they ran the closure. They run it again only if no other worker can."""
        return frozenset(worker for worker, kind in self.failures if kind is FailureKind.WORKER_LOST)

    def unblock(self) -> None:
        """Records that one of the awaited results exists. After the last result the closure may run."""
        if self.blockers <= 1:
            self.state = _TRANSITIONS.get((self.state, "unblock")) or self._refuse("unblock")
        self.blockers -= 1

    def start(self, worker: int, cancellation: Cancellation, now: float) -> Attempt:
        """Starts the first attempt, or a further attempt on another worker."""
        self.state = _TRANSITIONS.get((self.state, "start")) or self._refuse("start")
        self.attempts += 1
        attempt = Attempt(self, worker, cancellation, now)
        self.live += (attempt,)
        future = self.future
        future.is_started, future.worker = True, worker
        # Another part of the same `RunsFuture` may have had more attempts.
        future.attempts = max(future.attempts, self.attempts)
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """Removes an attempt that ended, with or without an outcome, from the live attempts."""
        self.live = () if self.live == (attempt,) else tuple(other for other in self.live if other is not attempt)

    def requeue(self) -> None:
        """Makes the closure wait again after its last attempt ended without an outcome."""
        self.state = _TRANSITIONS.get((self.state, "requeue")) or self._refuse("requeue")
        self.fusion_key = None
        # Other runs of the same future may be running.
        if self.whole is None:
            self.future.is_started = False

    def end(self, outcome: ClosureState) -> None:
        """Decides the outcome: DONE, FAILED or CANCELLED. The caller must then call `report` and drop the work."""
        self.state = _TRANSITIONS.get((self.state, outcome)) or self._refuse(outcome.value)

    def report(self, value: Any) -> None:
        """Sets the future to its result if DONE, else to an error. An error of None means that the user cancelled.

        Must be called without a lock, because futures have callbacks.
        """
        try:
            if self.state is DONE:
                self.future.set_result(value)
            elif value is None:
                self.future.set_cancelled()
            else:
                self.future.set_exception(value)
        finally:
            # The future is set even if a callback raised.
            self.is_reported = True

    def record_failure(self, worker: int, kind: FailureKind) -> int:
        """Records a failed attempt; returns how many attempts have failed with this kind."""
        self.failures += ((worker, kind),)
        return sum(past is kind for _, past in self.failures)

    def cancelled_error(self, reason: str) -> ClosureCancelledError:
        return ClosureCancelledError(f"{self} was cancelled because {reason}. Please reschedule it if it is needed.")

    def history(self) -> str:
        """Describes the failed attempts in order."""
        if not self.failures:
            return "no attempt has failed"
        return "; ".join(f"attempt {i} on worker {w}: {k.value}" for i, (w, k) in enumerate(self.failures, 1))

    def _refuse(self, event: str) -> NoReturn:
        raise InvalidTransitionError(
            f"{self} cannot go from {self.state.value} by the event '{event}' ({self.history()}). "
            "This is a defect of coordinator; please report it with this message."
        )

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"


class UncountedClosure(Closure):
    """A closure for optional work of the library, which no count includes."""

    __slots__ = ()

    runs = 0


class RunsClosure(Closure):
    """Consecutive runs of a `RunsFuture` for one worker. Calls hold the queue's lock, except `report` and `prepare`.

    Attributes:
      first: the number of the first run, from 0; -1 until the runs begin.
    """

    __slots__ = ("first", "runs", "whole")

    whole: RunsFuture

    def __init__(self, work: Any, name: str, number: int, future: RunsFuture, **settings: Any) -> None:
        super().__init__(work, name, number, future, **settings)
        self.whole = future
        self.runs = future.steps
        self.first = -1

    def prepare(self, fusion_key: FusionKey | None) -> None:
        """Prepares the closure of all runs before it is queued. A key of None makes each run a separate call."""
        self.whole.parts[self] = None
        self.whole.rest = self
        if fusion_key is not None and self.timeout is None:
            # `object()` makes the key unique, because other closures cannot join a call of these runs.
            self.fusion_key = self.whole.fusion_key = FusionKey(fusion_key.function, object())

    def report(self, value: Any) -> None:
        """Sets the future when all runs have a result, or when a run has none. See `Closure.report`."""
        try:
            if self.state is DONE:
                self.whole.add(self.first, self.runs, value)
            else:
                self.whole.end(value)
        finally:
            self.is_reported = True

    def leave_share(self, workers: int) -> "RunsClosure | None":
        """Keeps one worker's share of the runs that no worker has taken; returns a closure of the other runs, if any.

        Called just before the closure starts.
        """
        if self.whole.rest is not self:
            return None
        self.whole.rest = None
        if self.target is not None:
            return None
        return self._split(1 if self.timeout is not None else -(-self.runs // max(workers, 1)))

    def available(self) -> int:
        """Returns how many runs the started closure may make: its own runs, and the runs that no worker has taken."""
        rest = self.whole.rest
        return self.runs if rest is None or self.first >= 0 or self.timeout is not None else self.runs + rest.runs

    def begin(self, attempt: Attempt, count: int) -> "RunsClosure | None":
        """Keeps and numbers the first `count` runs, at most `available()`, because an attempt begins them.

        Returns the closure of the other runs, if any: a new closure, or the existing `rest` with other runs.
        """
        whole = self.whole
        if self.first >= 0:
            # An earlier attempt has numbered the runs.
            others = self._split(count)
            if others is not None:
                # All attempts before this one included the other runs.
                others.attempts, others.failures = attempt.number - 1, self.failures
                others.needs_another = self.needs_another
            return others
        self.first = whole.begun
        whole.begun += count
        rest = whole.rest
        if rest is None or self.runs == count:
            return self._split(count)
        rest.runs += self.runs - count
        self.runs = count
        if not rest.runs:
            whole.rest = None
            del whole.parts[rest]
        return rest

    def take_siblings(self) -> Sequence["RunsClosure"]:
        """Removes this ended part. Returns the other parts if this part has no result, because they then end too."""
        parts = self.whole.parts
        parts.pop(self, None)
        if self.state is DONE:
            return ()
        siblings = tuple(parts)
        parts.clear()
        return siblings

    def _split(self, at: int) -> "RunsClosure | None":
        """Keeps the first `at` runs; returns a new closure of the other runs, if any."""
        if at >= self.runs:
            return None
        whole = self.whole
        others = RunsClosure(self.work, self.name, self.number, whole, target=self.target, timeout=self.timeout)
        others.inputs, others.fusion_key = self.inputs, self.fusion_key
        others.runs, self.runs = self.runs - at, at
        whole.parts[others] = None
        if self.first >= 0:
            others.first = self.first + at
        else:
            whole.rest = others
        return others


_KINDS: dict[ClosureState, Kind] = {
    DONE: "closures_finished",
    FAILED: "closures_failed",
    CANCELLED: "closures_cancelled",
}


@dataclasses.dataclass(slots=True)
class Effects:
    """The effects of a change of the queue's state, which the queue carries out without its lock.

    Attributes:
      outcomes: the decided closures in the order in which their futures are set, each with its result, its error, or
        None if the user cancelled.
      cancelled: the attempts to cancel.
      ended: the attempt that ended without a result, if any. If `is_requeued`, the attempt's closure waits again.
      reason: why that closure was requeued, or the type of its error.
    """

    outcomes: list[tuple[Closure, Any]] = dataclasses.field(default_factory=list)
    cancelled: Sequence[Attempt] = ()
    ended: Attempt | None = None
    is_requeued: bool = False
    reason: str = ""

    def record(self, events: EventStream, call: Sequence[Attempt], now: float) -> None:
        """Records the decided closures and, if a call ended, its end; `call` has the attempts of the ended call."""
        attempt, others = call[0] if call else self.ended, self.outcomes
        if attempt is not None:
            closure = attempt.closure
            count = closure.runs
            kind: Kind
            if self.is_requeued:
                kind = "closures_retried"
            elif others and others[0][0].state is DONE:
                kind, count = "closures_finished", 0
                for decided, _ in others:
                    count += decided.runs
                others = []
            elif others and others[0][0] is closure:
                kind, self.reason = _KINDS[closure.state], type(others[0][1]).__name__
                others = others[1:]
            else:
                # The attempt's closure was decided before.
                kind, count = "closures_cancelled", 0
            events.record(kind, f"worker {attempt.worker}", closure.name, count, now - attempt.started, self.reason)
        if others:
            counts: Counter[tuple[Kind, str]] = Counter()
            for decided, _ in others:
                counts[_KINDS[decided.state], decided.name] += decided.runs
            for (kind, name), count in counts.items():
                events.record(kind, name=name, count=count)
