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
"""

import enum
import threading
import time
from collections.abc import Sequence
from typing import Any

from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.future import Future
from coordinator.runs_future import RunsFuture, RunsPart
from coordinator.runtime import Cancellation, FailureKind, FiniteInput, FusionKey


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
