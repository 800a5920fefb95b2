"""Delayed gradients in virtual time: a pull applies those whose delay is over; see `coordinator.updates.Delayed`."""

import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.rules.rule import GRADIENT, Course, Moved, Rule
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


@dataclasses.dataclass(frozen=True)
class Delayed(Rule):
    """Queues gradients; the first pull after a gradient's delay is over applies it, as an update of its own.

    What is queued at the end is in no update. A gradient is noted, with its staleness, when it is applied.

    Attributes:
      delay: a time of at least 0 seconds, or `inf`, under which nothing is ever applied; or a function that takes a
        worker's index, an int, and the time of the push in seconds, and returns seconds: below 0 is as 0, what is not
        a number as `inf`.

    Raises:
      SettingError: it is something else.
    """

    delay: float | Callable[[int, float], float]

    def __post_init__(self) -> None:
        delay = self.delay
        if callable(delay):
            return
        if isinstance(delay, bool) or not isinstance(delay, int | float) or not delay >= 0:
            raise SettingError("delay", f"must be a time of at least 0 seconds, inf or a function, got {delay!r}.")

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "delayed"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return DelayedCourse(model, record, self.delay)


@dataclasses.dataclass(frozen=True)
class _Queued:
    """A gradient that was pushed.

    Attributes:
      number: its place among all pushes.
      worker: whose it is, by index.
      pushed_at, delay: in seconds.
      pulled_version: what it was computed on.
      gradient: as the model gave it.
    """

    number: int
    worker: int
    pushed_at: float
    delay: float
    pulled_version: int
    gradient: Any


class DelayedCourse(Course):
    """A training under it; see `Course`."""

    def __init__(self, model: SimulatedModel, record: PushRecord, delay: float | Callable[[int, float], float]) -> None:
        super().__init__(model, record)
        self._delay = delay
        self._pushes = 0
        # Those that are due first come first, so that a pull looks at no more of them than it applies, and one.
        self._queue: list[tuple[float, int, _Queued]] = []

    def begin(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        due = []
        while self._queue and self._is_due(self._queue[0][2], now):
            due.append(heapq.heappop(self._queue)[2])
        for queued in sorted(due, key=lambda queued: queued.number):
            self._record.note(now, queued.worker, decisions.staleness(self.version, queued.pulled_version))
            self._model.apply_gradient(queued.gradient)
            self.version += 1
        return super().begin(worker, now)

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        delay = self._delay(worker.index, now) if callable(self._delay) else self._delay
        delay = math.inf if math.isnan(delay) else max(delay, 0.0)
        gradient = self._model.gradient(worker)
        queued = _Queued(self._pushes, worker.index, now, delay, worker.pulled_version, gradient)
        heapq.heappush(self._queue, (now + delay, queued.number, queued))
        self._pushes += 1
        worker.clock += 1
        return GRADIENT

    def _is_due(self, queued: _Queued, now: float) -> bool:
        return bool(decisions.is_delay_over(now, queued.pushed_at, queued.delay))
