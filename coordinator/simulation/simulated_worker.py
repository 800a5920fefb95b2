"""A worker in virtual time: what it is at, and what it has spent its time on."""

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.simulation.absence import Pause
from coordinator.simulation.arrival import Arrival
from coordinator.simulation.timeline import Activity, Lane


class SimulatedWorker:
    """The state of one worker.

    Args:
      index: its number.
      draw: gives what it computes for in its next step, in seconds, by its factor too short.
      factor: how many times as long as others it computes.
      pauses: when it stands still.
      lane: where its activities are drawn; None if they are not.

    Attributes:
      clock: the steps that it has finished.
      pulled_version: the version that it computes on.
      asking, beginning, pushing: its events: its question arrives; it may begin after a wait; its gradient arrives.
      steps_since_pull, is_active, is_under_way, is_warming_up, has_own_model, averaged_at: for the rules.
      parameters, gradient, average: for the model.
      moved: what the step that it begins is sent.
      is_waiting: whether its rule makes it wait.
      asked_at: when it last asked to begin, in seconds.
      compute_from, compute_to: when its present computation began and will have ended, in seconds; the same if none is.
      computed, waited, absent: what it has spent computing, waiting for its rule, and dead, in seconds.
      died_at: when it died, in seconds; None while it lives.
    """

    # Thousands of them, whose attributes are used at every event.
    __slots__ = (
        "absent",
        "asked_at",
        "asking",
        "average",
        "averaged_at",
        "beginning",
        "clock",
        "compute_from",
        "compute_to",
        "computed",
        "died_at",
        "draw",
        "factor",
        "gradient",
        "has_own_model",
        "index",
        "is_active",
        "is_under_way",
        "is_waiting",
        "is_warming_up",
        "lane",
        "moved",
        "parameters",
        "pauses",
        "pulled_version",
        "pushing",
        "steps_since_pull",
        "waited",
    )

    asking: Arrival
    beginning: Arrival
    pushing: Arrival

    def __init__(
        self, index: int, draw: Callable[[], float], factor: float, pauses: Sequence[Pause], lane: Lane | None
    ) -> None:
        self.index = index
        self.draw = draw
        self.factor = factor
        self.pauses = tuple(sorted(pauses, key=lambda pause: pause.at))
        self.lane = lane
        self.clock = 0
        self.pulled_version = 0
        self.steps_since_pull = 0
        self.is_active = self.is_under_way = self.is_waiting = False
        self.moved: Any = None
        self.is_warming_up = self.has_own_model = False
        self.averaged_at = 0.0
        self.parameters: Any = None
        self.gradient: Any = None
        self.average: Any = None
        self.asked_at = 0.0
        self.compute_from = self.compute_to = 0.0
        self.computed = self.waited = self.absent = 0.0
        self.died_at: float | None = None

    def compute(self, start: float) -> float:
        """It computes from a time on; returns until when, pauses included that fall into it; in seconds."""
        end = start + self.draw() * self.factor
        for pause in self.pauses:
            over = pause.at + pause.seconds
            if pause.at < end and over > start:
                end += over - max(pause.at, start)
        self.compute_from, self.compute_to = start, end
        if self.lane:
            self.lane.add(Activity.COMPUTE, start, end)
        return end

    def wait_over(self, now: float) -> None:
        """It has waited until now, in seconds."""
        self.waited += now - self.asked_at
        self.is_waiting = False
        if self.lane:
            self.lane.add(Activity.WAIT, self.asked_at, now)

    def settle(self, now: float) -> None:
        """Counts what has been done until now, in seconds, of what is not finished; it is not to be finished."""
        self.computed += max(0.0, min(self.compute_to, now) - self.compute_from)
        self.compute_to = self.compute_from
        if self.is_waiting:
            self.wait_over(now)
        if self.died_at is not None:
            self.absent += now - self.died_at
        if self.lane:
            self.lane.cut(now)
            if self.died_at is not None:
                self.lane.add(Activity.DEAD, self.died_at, now)

    def __repr__(self) -> str:
        died = "" if self.died_at is None else f", died at {self.died_at:g} s"
        return f"<SimulatedWorker {self.index}: {self.clock} steps{died}>"
