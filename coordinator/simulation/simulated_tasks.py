"""The tasks in virtual time: workers with their absences and timelines, and the queues of the parameter servers."""

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy

from coordinator.options import check_number
from coordinator.simulation.distribution import Constant, Distribution


@dataclasses.dataclass(frozen=True)
class QueueStatistics:
    """How messages waited at the rule's home server.

    Attributes:
      utilization: the share of the time that it was busy, from 0 to 1.
      mean_length: the mean number of messages in the queue when one more arrived.
      longest: the largest such number.
      mean_wait: the mean time that a message waited before it was served, in seconds.
    """

    utilization: float
    mean_length: float
    longest: int
    mean_wait: float


class ServerQueues:
    """Serves messages that go to all servers, each with a part of the model. The first is the rule's home.

    If the servers always take the same time for a message, they stay in step, and one is simulated for all. `service`
    is the time of a message on a server, in seconds, without the part that depends on its size. The home server will
    have served all messages at `home_free_at`, in seconds.
    """

    def __init__(self, count: int, service: Distribution, generator: np.random.Generator) -> None:
        self._draw = service.sampler(generator)
        self._others_free_at = [0.0] * (0 if isinstance(service, Constant) else count - 1)
        self._leaving: deque[float] = deque()
        self.home_free_at = 0.0
        self._messages = 0
        self._busy_seconds = self._waited_seconds = 0.0
        self._longest = self._found = 0

    def serve(self, now: float, extra: float, least: float) -> float:
        """Serves a message that arrives now, on every server; returns when the last one has served it, in seconds.

        Args:
          now: the time, in seconds; at least the time of the call before.
          extra: the additional time on each server, in seconds.
          least: the earliest end, in seconds: the worker's own link is busy until then.
        """
        free_at, seconds = self.home_free_at, extra + self._draw()
        self._messages += 1
        self._busy_seconds += seconds
        leaving = self._leaving
        if free_at > now:
            while leaving[0] <= now:
                leaving.popleft()
            self._waited_seconds += free_at - now
            found = len(leaving)
            self._found += found
            self._longest = max(self._longest, found)
            end = free_at + seconds
        else:
            leaving.clear()
            end = now + seconds
        leaving.append(end)
        self.home_free_at = end
        if self._others_free_at:
            draw = self._draw
            self._others_free_at = [max(now, free_at) + extra + draw() for free_at in self._others_free_at]
            end = max(end, *self._others_free_at)
        return end if end > least else least

    def statistics(self, seconds: float) -> QueueStatistics:
        """Returns how messages waited in the first `seconds`."""
        messages = max(self._messages, 1)
        return QueueStatistics(
            # The last messages may keep the server busy beyond the simulated time.
            utilization=min(self._busy_seconds / seconds, 1.0) if seconds else 0.0,
            mean_length=self._found / messages,
            longest=self._longest,
            mean_wait=self._waited_seconds / messages,
        )


# More than fit a picture.
_MOST_SPANS = 1000


@dataclasses.dataclass(frozen=True)
class Pause:
    """A worker stops for a while, as a stopped process does, and then continues.

    Its computation takes longer by that time; messages that it has sent are not affected.

    Attributes:
      worker: its index.
      at: when, in seconds from the beginning.
      seconds: for how long.
    """

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        for time in (self.at, self.seconds):
            check_number("pauses", time, minimum=0, maximum=math.inf, unit="seconds")


@dataclasses.dataclass(frozen=True)
class Death:
    """A worker dies and loses what it had in flight; if it returns, it starts as a new worker.

    Attributes:
      worker: its index.
      at: when, in seconds from the beginning.
      back_after: seconds until it returns; `inf` if it never does.
    """

    worker: int
    at: float
    back_after: float = math.inf

    def __post_init__(self) -> None:
        for time in (self.at, self.back_after):
            check_number("deaths", time, minimum=0, maximum=math.inf, unit="seconds")


class Activity(enum.Enum):
    """What a worker does with its time. Between these it communicates."""

    COMPUTE = "compute"
    WAIT = "wait"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Span:
    """One activity of one worker; times in seconds."""

    activity: Activity
    start: float
    end: float


class Timeline:
    """The first activities of the worker with this index, in order, for pictures."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.spans: list[Span] = []

    @property
    def known_until(self) -> float:
        """The time in seconds until which the timeline is complete; `inf` if it is complete."""
        return self.spans[-1].end if len(self.spans) == _MOST_SPANS else math.inf

    def add(self, activity: Activity, start: float, end: float) -> None:
        if end > start and len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(activity, start, end))

    def truncate(self, at: float) -> None:
        """Removes what was planned after a time, in seconds, because the worker died."""
        self.spans = [
            span if span.end <= at else dataclasses.replace(span, end=at) for span in self.spans if span.start < at
        ]


class ReusableEvent(simpy.Event):
    """An event of simpy that can be scheduled again after it has happened.

    To create an event for each message would cost as much as the rest of the message. `callback` is called with this
    event whenever it happens; `worker` is the worker whose message it is.
    """

    def __init__(self, environment: simpy.Environment, callback: Callable[[Any], Any], worker: Any) -> None:
        super().__init__(environment)
        self.worker = worker
        # `succeed` would set these, but it schedules the event, too.
        self._ok = True
        self._value = None
        self._own_callbacks = [callback]

    def schedule_in(self, seconds: float) -> None:
        """Schedules the event after a delay in seconds of virtual time; it must not be scheduled already."""
        self.callbacks = self._own_callbacks
        self.env.schedule(self, delay=seconds)

    def cancel(self) -> None:
        self.callbacks = []
        self._own_callbacks = []


# With slots: there are thousands of workers, and every event uses their attributes.
@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SimulatedWorker:
    """The state of one worker. Times are in seconds.

    Attributes:
      draw: returns the time of its next computation, before the factor.
      factor: multiplies the time of its computations.
      pauses: when it stops, in order.
      timeline: records its activities; None if they are not recorded.
      asking, beginning, pushing: its events: its request to begin arrives; it begins after a wait; its gradient
        arrives.
      clock: the number of steps that it has finished.
      pulled_version: the model version that it computes on.
      steps_since_pull, is_active, is_under_way, is_warming_up, has_own_model, averaged_at: state of the rules.
      parameters, gradient, average: state of the model.
      transfer: what is sent to it for the step that it begins.
      is_waiting, asked_at: whether its rule makes it wait; when it last asked to begin.
      compute_from, compute_to: begin and end of its current computation; equal if there is none.
      computed, waited, absent: the time it has spent computing, waiting for its rule, and dead.
      died_at: when it died; None while it lives.
    """

    index: int
    draw: Callable[[], float]
    factor: float
    pauses: Sequence[Pause]
    timeline: Timeline | None
    asking: ReusableEvent = dataclasses.field(init=False)
    beginning: ReusableEvent = dataclasses.field(init=False)
    pushing: ReusableEvent = dataclasses.field(init=False)
    clock: int = 0
    pulled_version: int = 0
    steps_since_pull: int = 0
    is_active: bool = False
    is_under_way: bool = False
    is_warming_up: bool = False
    has_own_model: bool = False
    averaged_at: float = 0.0
    parameters: Any = None
    gradient: Any = None
    average: Any = None
    transfer: Any = None
    is_waiting: bool = False
    asked_at: float = 0.0
    compute_from: float = 0.0
    compute_to: float = 0.0
    computed: float = 0.0
    waited: float = 0.0
    absent: float = 0.0
    died_at: float | None = None

    def __post_init__(self) -> None:
        self.pauses = sorted(self.pauses, key=lambda pause: pause.at)

    def compute(self, start: float) -> float:
        """Starts a computation; returns its end, pauses included. Both times in seconds."""
        end = start + self.draw() * self.factor
        for pause in self.pauses:
            over = pause.at + pause.seconds
            if pause.at < end and over > start:
                end += over - max(pause.at, start)
        self.compute_from, self.compute_to = start, end
        if self.timeline:
            self.timeline.add(Activity.COMPUTE, start, end)
        return end

    def end_wait(self, now: float) -> None:
        """Ends the worker's wait, at a time in seconds."""
        self.waited += now - self.asked_at
        self.is_waiting = False
        if self.timeline:
            self.timeline.add(Activity.WAIT, self.asked_at, now)

    def settle(self, now: float) -> None:
        """Counts the parts of unfinished activities until now, in seconds."""
        self.computed += max(0.0, min(self.compute_to, now) - self.compute_from)
        self.compute_to = self.compute_from
        if self.is_waiting:
            self.end_wait(now)
        if self.died_at is not None:
            self.absent += now - self.died_at
        if self.timeline:
            self.timeline.truncate(now)
            if self.died_at is not None:
                self.timeline.add(Activity.DEAD, self.died_at, now)

    def __repr__(self) -> str:
        died = "" if self.died_at is None else f", died at {self.died_at:g} s"
        return f"<SimulatedWorker {self.index}: {self.clock} steps{died}>"
