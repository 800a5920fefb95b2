"""One scheduled function with its arguments, the states it goes through, and the attempts to run it.

              unblock               take                 result
    BLOCKED ---------> WAITING ----------------> RUNNING -------> DONE
       |                |   ^                     |  |  \\-------> FAILED    error of its own
       |                |   \\---- hand back ------/  |
       |                |      (worker lost, ...)    |
       \\----------------\\------> CANCELLED, FAILED <-/

A closure is blocked while it waits for the results that are its arguments. While it runs it has one attempt under way,
or more if it overran its time and is tried elsewhere too; the first that comes to an end decides its outcome. It is
handed back when the last of them ended without one.

A closure promises that its states change only along these arrows; anything else raises `InvalidTransitionError` with
the closure's history.
"""

import enum
import time
from typing import Any

from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.future import Future
from coordinator.line import Place
from coordinator.runtime import Cancellation, FailureKind


class ClosureState(enum.Enum):
    """Where a closure is between `schedule` and its result."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    # Enum's own is Python code, and every change of every closure looks states up.
    __hash__ = object.__hash__


_ENDS = {ClosureState.DONE, ClosureState.FAILED, ClosureState.CANCELLED}

_ALLOWED = {
    ClosureState.BLOCKED: {ClosureState.WAITING, ClosureState.FAILED, ClosureState.CANCELLED},
    ClosureState.WAITING: {ClosureState.RUNNING, ClosureState.FAILED, ClosureState.CANCELLED},
    ClosureState.RUNNING: {ClosureState.RUNNING, ClosureState.WAITING, *_ENDS},
    ClosureState.DONE: set[ClosureState](),
    ClosureState.FAILED: set[ClosureState](),
    ClosureState.CANCELLED: set[ClosureState](),
}


class Attempt:
    """What a worker holds while it runs a closure.

    Attributes:
      closure: what is tried.
      work: its work, kept here because a closure that has its outcome lets its own go.
      worker: the index of the worker.
      number: 1 for the closure's first attempt.
      cancellation: reaches this attempt alone.
      call_cancellation: cancels the call that it is made in, with all others that are.
      started: when, on the `time.monotonic` clock.
    """

    __slots__ = ("call_cancellation", "cancellation", "closure", "number", "started", "work", "worker")

    def __init__(self, closure: "Closure", work: Any, worker: int, number: int, cancellation: Cancellation) -> None:
        self.closure = closure
        self.work = work
        self.worker = worker
        self.number = number
        self.cancellation = self.call_cancellation = cancellation
        self.started = time.monotonic()

    @property
    def may_be_fused(self) -> bool:
        """Whether it may be made in one call with others: it is a first one, of a closure that asks for nothing."""
        return self.number == 1 and self.closure.asks_for_nothing

    @property
    def is_latest(self) -> bool:
        """Whether no attempt of its closure that is under way was begun after it."""
        return bool(self.closure.live) and self.closure.live[-1] is self

    def __repr__(self) -> str:
        return f"attempt {self.number} of {self.closure} on worker {self.worker}"


class Closure(Place):
    """What a worker is asked to run, and the future that tells.

    Args:
      work: what the runtime runs; opaque to the core.
      name: the function's name, for people.
      number: the place in the order of scheduling.
      future: told the outcome.
      target: the only worker that may run it, or None for any.
      timeout: an attempt that takes longer, in seconds, is made elsewhere too; None for no limit.
      is_internal: whether it is the library's own: neither `join` nor an error of another closure heeds it.
      blockers: how many results it waits for before it may run.

    Attributes:
      attempts: how often a worker has started it.
      live: the attempts that are under way.
      waiting_since: when it was last put in a line, on the `time.monotonic` clock.
      counts: whether it is still to be waited for by `join`.
    """

    __slots__ = (
        "_history",
        "_state",
        "attempts",
        "blockers",
        "counts",
        "future",
        "is_internal",
        "live",
        "name",
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
        future: Future,
        *,
        target: int | None = None,
        timeout: float | None = None,
        is_internal: bool = False,
        blockers: int = 0,
    ) -> None:
        super().__init__()
        self.work = work
        self.name = name
        self.number = number
        self.future = future
        self.target = target
        self.timeout = timeout
        self.is_internal = is_internal
        self.blockers = blockers
        self.counts = False
        self.attempts = 0
        self.live: tuple[Attempt, ...] = ()
        self.waiting_since = time.monotonic()
        self._state = ClosureState.BLOCKED if blockers else ClosureState.WAITING
        self._history: tuple[tuple[int, FailureKind], ...] = ()

    @property
    def state(self) -> ClosureState:
        """Where the closure is now."""
        return self._state

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is decided."""
        return self._state in _ENDS

    @property
    def asks_for_nothing(self) -> bool:
        """Whether it may run anywhere, for as long as it takes."""
        return self.target is None and self.timeout is None and not self.is_internal

    def unblock(self) -> None:
        """One of the results that it waits for is there; with the last of them it may run."""
        self.blockers -= 1
        if not self.blockers:
            self._change(ClosureState.WAITING)
            self.waiting_since = time.monotonic()

    def start(self, worker: int, cancellation: Cancellation) -> Attempt:
        """A worker begins an attempt, the first or one more beside a slow one."""
        self._change(ClosureState.RUNNING)
        self.attempts += 1
        attempt = Attempt(self, self.work, worker, self.attempts, cancellation)
        self.live += (attempt,)
        self.future.is_started = True
        return attempt

    def leave(self, attempt: Attempt) -> None:
        """An attempt came to an end, with or without an outcome."""
        self.live = () if self.live == (attempt,) else tuple(other for other in self.live if other is not attempt)

    def hand_back(self) -> None:
        """The last attempt ended without an outcome; another may be made."""
        self._change(ClosureState.WAITING)
        self.waiting_since = time.monotonic()
        self.future.is_started = False

    def end(self, state: ClosureState) -> None:
        """The outcome is decided; `let_go` must follow."""
        self._change(state)

    def let_go(self) -> None:
        """Drops the work. To be called with no lock held: arguments may have destructors of the user's."""
        self.work = None

    def record_failure(self, worker: int, kind: FailureKind) -> int:
        """Notes that an attempt failed; returns how many attempts failed in this way so far."""
        self._history += ((worker, kind),)
        return sum(past is kind for _, past in self._history)

    def withdrawal(self, reason: str) -> ClosureCancelledError:
        """The error for the future of this closure when it is withdrawn."""
        return ClosureCancelledError(f"{self} was cancelled because {reason}. Please reschedule it if it is wanted.")

    def history(self) -> str:
        """The attempts that failed, in order, in words."""
        if not self._history:
            return "no attempt has failed"
        return "; ".join(f"attempt {i} on worker {w}: {k.value}" for i, (w, k) in enumerate(self._history, 1))

    def _change(self, state: ClosureState) -> None:
        if state not in _ALLOWED[self._state]:
            raise InvalidTransitionError(
                f"{self} cannot go from {self._state.value} to {state.value} ({self.history()}). "
                "This is a defect of coordinator; please report it with this message."
            )
        self._state = state

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"
