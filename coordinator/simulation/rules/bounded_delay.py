"""Bounded delay in virtual time: workers wait before they compute what would be too late.

See `coordinator.updates.BoundedDelay`.
"""

import dataclasses
import math
from collections import deque

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.least_value import LeastValue
from coordinator.simulation.rules.rule import GRADIENT, Course, Moved, Rule, check_whole
from coordinator.simulation.rules.synchronous import AccumulatingCourse
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions

# More updates than there will ever be.
_UNBOUNDED = 2**62


@dataclasses.dataclass(frozen=True)
class BoundedDelay(Rule):
    """Lets a worker begin only if no gradient can become more than `max_delay` updates old by that.

    Attributes:
      max_delay: a whole number of at least 0, or `inf`, under which nobody waits: then this is n-softsync (arXiv
        1511.05950), with n = workers / grads_to_wait.
      grads_to_wait: how many gradients make an update, at least 1.

    Raises:
      SettingError: they are something else.
    """

    max_delay: float
    grads_to_wait: int = 1

    def __post_init__(self) -> None:
        if self.max_delay != math.inf:
            delay = self.max_delay
            if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
                raise SettingError("max_delay", f"must be a whole number of at least 0, or inf, got {delay!r}.")
        check_whole("grads_to_wait", self.grads_to_wait, least=1)

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "bounded_delay"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        max_delay = _UNBOUNDED if self.max_delay == math.inf else int(self.max_delay)
        return BoundedDelayCourse(model, record, self.grads_to_wait, max_delay)


class BoundedDelayCourse(AccumulatingCourse):
    """A training under it; see `Course`.

    Whether one may begin is the same for all who wait, so they begin in the order in which they came.
    """

    def __init__(self, model: SimulatedModel, record: PushRecord, grads_to_wait: int, max_delay: int) -> None:
        super().__init__(model, record, grads_to_wait)
        self.lined_up: deque[SimulatedWorker] = deque()
        self._max_delay = max_delay
        self._under_way = LeastValue()

    def may_begin(self, worker: SimulatedWorker) -> bool:
        """See `Course`."""
        del worker
        version, under_way = self.version, self._under_way
        before = version * self._grads_to_wait + self._waiting + len(under_way)
        may: bool = decisions.may_start(before, under_way.least(version), self._grads_to_wait, self._max_delay)
        return may

    def hold(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        self.lined_up.append(worker)

    def released(self) -> SimulatedWorker | None:
        """See `Course`."""
        return self.lined_up.popleft() if self.lined_up and self.may_begin(self.lined_up[0]) else None

    def withdraw(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        if worker in self.lined_up:
            self.lined_up.remove(worker)

    def begin(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        self._under_way.add(self.version)
        worker.is_under_way = True
        return super().begin(worker, now)

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        self.forget(worker)
        self._note(worker, now)
        self._take(worker)
        return GRADIENT

    def forget(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        if worker.is_under_way:
            self._under_way.remove(worker.pulled_version)
            worker.is_under_way = False
