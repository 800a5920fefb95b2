"""One scheduled function with its arguments, and the states it goes through.

            put                take                 result
    (new) ------> WAITING ----------------> RUNNING -------> DONE
                   |   ^                     |  |  \\-------> FAILED    error of its own
                   |   \\---- hand back ------/  |
                   |      (worker lost, ...)    |
                   \\------------> CANCELLED <---/

A closure promises that its states change only along these arrows; anything else raises `InvalidTransitionError` with
the closure's history.
"""

import enum
import time
from typing import Any

from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.future import Future
from coordinator.runtime import Cancellation, FailureKind


class ClosureState(enum.Enum):
    """Where a closure is between `schedule` and its result."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ALLOWED = {
    ClosureState.WAITING: {ClosureState.RUNNING, ClosureState.CANCELLED},
    ClosureState.RUNNING: {ClosureState.WAITING, ClosureState.DONE, ClosureState.FAILED, ClosureState.CANCELLED},
    ClosureState.DONE: set[ClosureState](),
    ClosureState.FAILED: set[ClosureState](),
    ClosureState.CANCELLED: set[ClosureState](),
}


class Closure:
    """What a worker is asked to run once, and the future that tells.

    Attributes:
      work: what the runtime runs; opaque to the core.
      name: the function's name, for people.
      number: the place in the order of scheduling.
      future: told the outcome.
      target: the only worker that may run it, or None for any.
      cancellation: reaches the attempt that runs now; None while waiting.
      attempts: how often a worker has started it.
      started: when the attempt that runs now started, on the `time.monotonic` clock.
    """

    __slots__ = (
        "_history",
        "_state",
        "attempts",
        "cancellation",
        "future",
        "name",
        "number",
        "started",
        "target",
        "work",
        "worker",
    )

    def __init__(self, work: Any, name: str, number: int, future: Future, target: int | None = None) -> None:
        self.work = work
        self.name = name
        self.number = number
        self.future = future
        self.target = target
        self.worker: int | None = None
        self.cancellation: Cancellation | None = None
        self.attempts = 0
        self.started = 0.0
        self._state = ClosureState.WAITING
        self._history: tuple[tuple[int, FailureKind], ...] = ()

    @property
    def state(self) -> ClosureState:
        """Where the closure is now."""
        return self._state

    def start(self, worker: int, cancellation: Cancellation) -> None:
        """A worker begins an attempt."""
        self._change(ClosureState.RUNNING)
        self.worker = worker
        self.cancellation = cancellation
        self.attempts += 1
        self.started = time.monotonic()

    def hand_back(self) -> None:
        """The attempt ended without an outcome; another may be made."""
        self._change(ClosureState.WAITING)
        self.cancellation = None

    def end(self, state: ClosureState) -> None:
        """The closure reached a final state; `let_go` must follow."""
        self._change(state)

    def let_go(self) -> None:
        """Drops the work. To be called with no lock held: arguments may have destructors of the user's."""
        self.cancellation = None
        self.work = None

    def record_failure(self, kind: FailureKind) -> int:
        """Notes that the attempt that runs now failed; returns how many attempts failed in this way so far."""
        assert self.worker is not None
        self._history += ((self.worker, kind),)
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
