"""The stale synchronous rule in virtual time: local models, not too far apart.

See `coordinator.updates.StaleSynchronous`.
"""

import dataclasses
import heapq
import itertools

from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.asynchronous import AsynchronousCourse, Modulation, check_modulation
from coordinator.simulation.rules.least_value import LeastValue
from coordinator.simulation.rules.rule import NOTHING, Course, Moved, Rule, check_whole
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


@dataclasses.dataclass(frozen=True)
class StaleSynchronous(Rule):
    """Pulls every few steps; in between, a worker applies its gradients to its own copy as well as pushing them.

    Attributes:
      get_model_frequency: a worker pulls before every so many of its steps, at least 1.
      max_lead: a worker has finished at most so many steps more than the slowest, at least 1; None never waits.
      lr_staleness_modulation: see `Asynchronous`; a worker's own copy is changed with the full rate.

    Raises:
      SettingError: they are something else.
    """

    get_model_frequency: int = 1
    max_lead: int | None = None
    lr_staleness_modulation: Modulation = False

    def __post_init__(self) -> None:
        check_modulation(self.lr_staleness_modulation)
        check_whole("get_model_frequency", self.get_model_frequency, least=1)
        if self.max_lead is not None:
            check_whole("max_lead", self.max_lead, least=1)

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "stale_synchronous"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return StaleSynchronousCourse(model, record, self)


class StaleSynchronousCourse(AsynchronousCourse):
    """A training under it; see `Course`. Of those who wait the one with the least clock may begin first."""

    def __init__(self, model: SimulatedModel, record: PushRecord, rule: StaleSynchronous) -> None:
        super().__init__(model, record, rule.lr_staleness_modulation)
        self.lined_up: list[tuple[int, int, SimulatedWorker]] = []
        self._frequency = rule.get_model_frequency
        self._max_lead = rule.max_lead
        self._clocks = LeastValue()
        self._numbers = itertools.count()

    def may_begin(self, worker: SimulatedWorker) -> bool:
        """See `Course`."""
        if self._max_lead is None:
            return True
        if not worker.is_active:
            self._join_in(worker)
        # Its own clock is among them, which changes no answer: the slowest may always begin.
        may: bool = decisions.may_lead(worker.clock, self._clocks.least(worker.clock), self._max_lead)
        return may

    def hold(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        heapq.heappush(self.lined_up, (worker.clock, next(self._numbers), worker))

    def released(self) -> SimulatedWorker | None:
        """See `Course`."""
        return heapq.heappop(self.lined_up)[2] if self.lined_up and self.may_begin(self.lined_up[0][2]) else None

    def withdraw(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        self.lined_up = [waiting for waiting in self.lined_up if waiting[2] is not worker]
        heapq.heapify(self.lined_up)

    def begin(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        if decisions.is_pull_due(worker.steps_since_pull, self._frequency):
            worker.steps_since_pull = 0
            return super().begin(worker, now)
        return NOTHING

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        if worker.is_active:
            self._clocks.remove(worker.clock)
            self._clocks.add(worker.clock + 1)
        worker.steps_since_pull += 1
        moved = super().push(worker, now)
        self._model.apply_to_own(worker)
        return moved

    def forget(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        worker.steps_since_pull = 0
        if worker.is_active:
            self._clocks.remove(worker.clock)
            worker.is_active = False

    def _join_in(self, worker: SimulatedWorker) -> None:
        worker.clock = decisions.rejoined_clock(worker.clock, self._clocks.least(worker.clock))
        self._clocks.add(worker.clock)
        worker.is_active = True
