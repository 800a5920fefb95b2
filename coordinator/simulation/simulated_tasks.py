"""The simulated tasks: workers with their absences and timelines, and the queues of the parameter servers."""

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
    """How messages waited at the home server of the rule.

    Attributes:
      utilization: the share of the time in which the server was busy, from 0 to 1.
      mean_length: the mean number of messages in the queue when one more arrived.
      longest: the largest number of messages in the queue when one more arrived.
      mean_wait: the mean time that a message waited before it was served, in seconds.
    """

    utilization: float
    mean_length: float
    longest: int
    mean_wait: float


class ServerQueues:
    """Serves messages that go to all servers, which have parts of the model. The first server is the rule's home.

    If the servers always take the same time for a message, they stay in step, and one server is simulated for all.
    `service` is the time in seconds that a message takes on a server, without the time for the message's bytes. At
    `home_free_at`, in seconds, the home server will have served all messages.
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
        """Serves a message on every server. Returns the time in seconds when the last server has served the message.

        Args:
          now: the time of arrival in seconds, at least the time of the previous call.
          extra: the additional time on each server, in seconds.
          least: the earliest end in seconds, because the worker's own link is busy until then.
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


# The maximum number of spans in a timeline, which are more than fit a picture.
_MOST_SPANS = 1000


@dataclasses.dataclass(frozen=True)
class Pause:
    """A pause of a worker, which stops for a while, as a stopped process does, and then continues.

    The worker's computation takes longer by the pause. Messages that the worker has sent are not affected.

    Attributes:
      worker: the index of the worker.
      at: the beginning of the pause, in seconds from the beginning of the simulation.
      seconds: the length of the pause.
    """

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        for time in (self.at, self.seconds):
            check_number("pauses", time, minimum=0, maximum=math.inf, unit="seconds")


@dataclasses.dataclass(frozen=True)
class Death:
    """The death of a worker, which loses its step in flight. If the worker returns, it starts as a new worker.

    Attributes:
      worker: the index of the worker.
      at: the time of the death, in seconds from the beginning of the simulation.
      back_after: the seconds until the worker returns, or `inf` if the worker never returns.
    """

    worker: int
    at: float
    back_after: float = math.inf

    def __post_init__(self) -> None:
        for time in (self.at, self.back_after):
            check_number("deaths", time, minimum=0, maximum=math.inf, unit="seconds")


class Activity(enum.Enum):
    """An activity of a worker. Between two activities, the worker communicates."""

    COMPUTE = "compute"
    WAIT = "wait"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Span:
    """One activity of one worker. Times are in seconds."""

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
        """The time in seconds until which the timeline has all activities, or `inf` for a complete timeline."""
        return self.spans[-1].end if len(self.spans) == _MOST_SPANS else math.inf

    def add(self, activity: Activity, start: float, end: float) -> None:
        if end > start and len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(activity, start, end))

    def truncate(self, at: float) -> None:
        """Removes the activities after a time in seconds, which were planned before the worker died."""
        self.spans = [
            span if span.end <= at else dataclasses.replace(span, end=at) for span in self.spans if span.start < at
        ]


class ReusableEvent(simpy.Event):
    """An event of simpy that can be scheduled again after it has happened.

    Creating an event for each message would cost as much as the rest of the message. `callback` is called with the
    event whenever the event happens. `worker` is the worker to which the message belongs.
    """

    def __init__(self, environment: simpy.Environment, callback: Callable[[Any], Any], worker: Any) -> None:
        super().__init__(environment)
        self.worker = worker
        # `succeed` would set these attributes, but would also schedule the event.
        self._ok = True
        self._value = None
        self._own_callbacks = [callback]

    def schedule_in(self, seconds: float) -> None:
        """Schedules the event after a delay in seconds of virtual time. The event must not be scheduled already."""
        self.callbacks = self._own_callbacks
        self.env.schedule(self, delay=seconds)

    def cancel(self) -> None:
        self.callbacks = []
        self._own_callbacks = []


# The class has slots, because there are thousands of workers, and every event uses their attributes.
@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SimulatedWorker:
    """The state of one worker. Times are in seconds.

    Attributes:
      draw: a function that returns the time of the next computation, before `factor` is applied.
      factor: the factor of the time of the worker's computations.
      pauses: the pauses of the worker, in order.
      timeline: records the activities of the worker, or is None.
      asking, beginning, pushing: the events of the worker: its request to begin arrives, its step begins after a wait,
        and its gradient arrives.
      clock: the number of steps that the worker has finished.
      pulled_version: the version of the model on which the worker computes.
      steps_since_pull, is_active, is_under_way, is_warming_up, has_own_model, averaged_at: state of the rules.
      parameters, gradient, average: state of the model.
      transfer: the data that the servers send to the worker for the step.
      is_waiting, asked_at: whether the rule makes the worker wait, and when the last wait began.
      compute_from, compute_to: the begin and end of the current computation, which are equal if there is none.
      computed, waited, absent: the time that the worker has spent computing, waiting for the rule, and dead.
      died_at: when the worker died, or None while the worker lives.
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
        """Starts a computation at `start`. Returns the end, including pauses. Both times are in seconds."""
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
        """Adds the elapsed times of unfinished activities. `now` is in seconds."""
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
