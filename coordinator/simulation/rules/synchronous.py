"""The synchronous rule in virtual time: updates of fresh gradients; see `coordinator.updates.Synchronous`."""

import dataclasses

from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.rule import GRADIENT, Course, Moved, Rule, check_whole
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


@dataclasses.dataclass(frozen=True)
class Synchronous(Rule):
    """Applies the mean of `grads_to_wait` gradients of the present version; rejects others. Nobody waits.

    Attributes:
      grads_to_wait: how many gradients make an update, at least 1. Workers beyond that are backup workers.

    Raises:
      SettingError: it is no whole number of at least 1.
    """

    grads_to_wait: int

    def __post_init__(self) -> None:
        check_whole("grads_to_wait", self.grads_to_wait, least=1)

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "synchronous"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return SynchronousCourse(model, record, self.grads_to_wait)


class AccumulatingCourse(Course):
    """What courses share that make an update of the mean of some gradients; see `Course`."""

    def __init__(self, model: SimulatedModel, record: PushRecord, grads_to_wait: int) -> None:
        super().__init__(model, record)
        self._grads_to_wait = grads_to_wait
        self._waiting = 0

    def _take(self, worker: SimulatedWorker) -> None:
        self._model.add(worker)
        worker.clock += 1
        self._waiting += 1
        if decisions.is_complete(self._waiting, self._grads_to_wait):
            self._model.apply_mean()
            self.version += 1
            self._waiting = 0


class SynchronousCourse(AccumulatingCourse):
    """A training under it; see `Course`."""

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        self._note(worker, now)
        if decisions.is_accepted(self.version, worker.pulled_version, self._waiting, self._grads_to_wait):
            self._take(worker)
        else:
            self.rejected += 1
        return GRADIENT
