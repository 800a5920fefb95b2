"""Model averaging in virtual time: a model for each worker, averaged beside the computation.

See `coordinator.updates.ModelAverage`.
"""

import dataclasses
import math

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.asynchronous import AsynchronousCourse
from coordinator.simulation.rules.rule import MODEL_BESIDE, NOTHING, Course, Moved, Rule, check_whole
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


@dataclasses.dataclass(frozen=True)
class ModelAverage(Rule):
    """Every worker trains a model of its own; beside a gradient's computation its model is averaged with all.

    An averaging is what is counted as a push and as an update.

    Attributes:
      period: the least time between two averagings of one worker, in seconds, at least 0.
      warmup_steps: until the fastest worker has finished so many steps, all train the shared model; at least 0.

    Raises:
      SettingError: they are something else.
    """

    period: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        period = self.period
        if isinstance(period, bool) or not isinstance(period, int | float) or not 0 <= period < math.inf:
            raise SettingError("period", f"must be a time of at least 0 seconds, got {period!r}.")
        check_whole("warmup_steps", self.warmup_steps, least=0)

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "model_average"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return ModelAverageCourse(model, record, self)


class ModelAverageCourse(AsynchronousCourse):
    """A training under it; see `Course`."""

    def __init__(self, model: SimulatedModel, record: PushRecord, rule: ModelAverage) -> None:
        super().__init__(model, record)
        self._rule = rule
        self._fastest_clock = 0

    def begin(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        rule = self._rule
        worker.is_warming_up = self._fastest_clock < rule.warmup_steps
        moved = NOTHING
        if worker.is_warming_up or not worker.has_own_model:
            moved = super().begin(worker, now)
            worker.has_own_model = not worker.is_warming_up
            worker.averaged_at = now
        if decisions.is_average_due(now - worker.averaged_at, rule.period, self._fastest_clock, rule.warmup_steps):
            self._note(worker, now)
            self.version += 1
            worker.pulled_version = self.version
            worker.averaged_at = now
            self._model.average(worker)
            # A worker that has only now taken the shared model did so on the way: once in its life.
            return MODEL_BESIDE
        return moved

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        if worker.is_warming_up:
            moved = super().push(worker, now)
        else:
            self._model.train_own(worker)
            worker.clock += 1
            moved = NOTHING
        self._fastest_clock = max(self._fastest_clock, worker.clock)
        return moved

    def forget(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        worker.has_own_model = False
        self._model.leave_out(worker)
