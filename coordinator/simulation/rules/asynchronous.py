"""The asynchronous rule in virtual time: gradients are applied as they come; see `coordinator.updates.Asynchronous`."""

import dataclasses
from collections.abc import Callable

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.rule import GRADIENT, Course, Moved, Rule
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions

# What `lr_staleness_modulation` may be.
Modulation = bool | Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Asynchronous(Rule):
    """Applies every gradient as it comes.

    Attributes:
      lr_staleness_modulation: False; True, to divide the learning rate by the staleness; or a function that takes the
        staleness, an int, and returns what the learning rate is multiplied by.

    Raises:
      SettingError: it is something else.
    """

    lr_staleness_modulation: Modulation = False

    def __post_init__(self) -> None:
        check_modulation(self.lr_staleness_modulation)

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "asynchronous"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return AsynchronousCourse(model, record, self.lr_staleness_modulation)


class AsynchronousCourse(Course):
    """A training under it; see `Course`."""

    def __init__(self, model: SimulatedModel, record: PushRecord, modulation: Modulation = False) -> None:
        super().__init__(model, record)
        self._scale = decisions.learning_rate_scale if modulation is True else modulation or None

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        staleness = self._note(worker, now)
        self._model.apply(worker, self._scale(staleness) if self._scale else 1.0)
        self.version += 1
        worker.clock += 1
        return GRADIENT


def check_modulation(modulation: object) -> None:
    """Refuses what `lr_staleness_modulation` may not be."""
    if not (isinstance(modulation, bool) or callable(modulation)):
        raise SettingError(
            "lr_staleness_modulation", f"must be True, False or a function of the staleness, got {modulation!r}."
        )
