"""What an update rule is in virtual time: a setting that users choose, and its course, which decides.

    ask    may_begin? -- no --> hold ... released()
              | yes
    pull   begin          what the worker computes on, and what that moves
    push   push           what the gradient does to the model, and what that moves

The engine is written once and asks these questions; each rule answers those in which it differs. Whatever is decided is
decided by `coordinator.updates.decisions`, the functions that the cluster's own graphs run.
"""

import dataclasses
import enum
from collections import deque

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


class Moved(enum.Enum):
    """What a worker and the servers send each other, at the beginning of a step and at its end."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    # There and back, beside the computation.
    MODEL_BESIDE = enum.auto()
    GRADIENT = enum.auto()


# Looked up once: a member of an enumeration costs as much as a decision.
NOTHING, MODEL, MODEL_BESIDE, GRADIENT = Moved


class Course:
    """One training under a rule: its state, and its answers. As it is here, nobody waits and nothing is rejected.

    Args:
      model: what is trained.
      record: notes pushes.

    Attributes:
      version: the number of updates so far.
      rejected: how many gradients were not taken.
      lined_up: workers that wait to begin; empty under most rules.
    """

    def __init__(self, model: SimulatedModel, record: PushRecord) -> None:
        self.version = 0
        self.rejected = 0
        self.lined_up: deque[SimulatedWorker] | list[tuple[int, int, SimulatedWorker]] = deque()
        self._model = model
        self._record = record

    def may_begin(self, worker: SimulatedWorker) -> bool:
        """Whether a worker may begin a step."""
        del worker
        return True

    def hold(self, worker: SimulatedWorker) -> None:
        """Has a worker wait that may not begin."""
        raise NotImplementedError

    def released(self) -> SimulatedWorker | None:
        """The next worker that waits and may begin now, which no longer waits then; None if there is none."""
        return None

    def withdraw(self, worker: SimulatedWorker) -> None:
        """A worker that waited waits no more: it died."""

    def begin(self, worker: SimulatedWorker, now: float) -> Moved:
        """A worker begins a step, at a time in seconds; returns what is sent to it."""
        del now
        worker.pulled_version = self.version
        self._model.pull(worker)
        return MODEL

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """A worker's gradient is there, at a time in seconds; returns what was sent with it."""
        raise NotImplementedError

    def forget(self, worker: SimulatedWorker) -> None:
        """The servers are told that a worker has nothing under way: it died."""

    # What they share.

    def _note(self, worker: SimulatedWorker, now: float) -> int:
        staleness: int = decisions.staleness(self.version, worker.pulled_version)
        self._record.note(now, worker.index, staleness)
        return staleness


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule with its settings, which have the names that they have in `coordinator.updates`."""

    @property
    def name(self) -> str:
        """What the command line calls it."""
        raise NotImplementedError

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """A training under it."""
        raise NotImplementedError

    def __str__(self) -> str:
        settings = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name}({', '.join(settings)})".removesuffix("()")


def check_whole(option: str, value: object, *, least: int) -> None:
    """Refuses what is no whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(option, f"must be a whole number of at least {least}, got {value!r}.")
