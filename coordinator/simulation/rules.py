"""The simulated update rules. Each rule has a class for its settings, and a class for a run, which makes decisions.

Each settings class has the name, the settings and the checks of a rule of `coordinator.updates`.

    ask    may_begin? -- no --> add_waiting ... next_ready
              | yes
    pull   begin          the model on which the worker computes, and the data that is sent to the worker
    push   push           the effect of the gradient on the model, and the data that was sent with the gradient

The engine calls these methods. Each rule overrides the methods in which it differs from the base class. The methods
decide by the functions of `coordinator.updates.decisions`, which the graphs of a real cluster call too.
"""

import bisect
import dataclasses
import enum
import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from coordinator.simulation.learning import SimulatedModel
from coordinator.simulation.simulated_tasks import SimulatedWorker
from coordinator.updates import decisions
from coordinator.updates.settings import (
    AsynchronousSettings,
    BoundedDelaySettings,
    DelayedSettings,
    ModelAverageSettings,
    StaleSynchronousSettings,
    SynchronousSettings,
)


class IntegerMultiset:
    """Integers with a minimum, at a cost that does not depend on the number of integers.

    The integers grow, as clocks and versions do, so that a new integer is at most a little below the minimum.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._size = 0
        self._minimum = 0

    def add(self, value: int) -> None:
        if not self._counts or value < self._minimum:
            self._minimum = value
        self._counts[value] = self._counts.get(value, 0) + 1
        self._size += 1

    def remove(self, value: int) -> None:
        """Removes one occurrence of an integer, which must be present."""
        counts = self._counts
        left = counts[value] - 1
        self._size -= 1
        if left:
            counts[value] = left
            return
        del counts[value]
        if counts and value == self._minimum:
            while value not in counts:
                value += 1
            self._minimum = value

    def minimum(self, default: int) -> int:
        """Returns the minimum, or a default if there are no integers."""
        return self._minimum if self._counts else default

    def __len__(self) -> int:
        return self._size


class Transfer(enum.Enum):
    """The data that a worker and the servers send each other when a step begins or ends."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    # The model is sent in both directions during the computation.
    MODEL_BOTH_WAYS = enum.auto()
    GRADIENT = enum.auto()


# The members are module attributes, because the look-up of a member in the enumeration costs as much as a decision.
NOTHING, MODEL, MODEL_BOTH_WAYS, GRADIENT = Transfer


class RuleRun:
    """The state and the decisions of a rule in one training.

    In this base class, no worker waits, and each gradient is applied when it arrives. A subclass that makes workers
    wait overrides `may_begin`. `scale` maps the staleness of a gradient and the version of the model to a factor of the
    learning rate. `grads_to_wait` is for subclasses whose updates are means of several gradients.

    Attributes:
      version: the number of updates so far.
      rejected: the number of gradients that were rejected.
      waiting: the workers that wait to begin, in the order in which they will begin.
      push_times, push_workers, staleness: the time in seconds, the worker's index and the staleness in updates of every
        push, in the order of arrival at the parameter servers.
    """

    def __init__(
        self, model: SimulatedModel, scale: Callable[[int, int], float] | None = None, grads_to_wait: int = 1
    ) -> None:
        self.version = 0
        self.rejected = 0
        self.waiting: deque[SimulatedWorker] = deque()
        # Arrays, not lists: there may be millions of pushes, and an array takes eight bytes for each push.
        self.push_times = array("d")
        self.push_workers = array("l")
        self.staleness = array("q")
        self._model = model
        self._scale = scale
        self._grads_to_wait = grads_to_wait
        self._gradients: list[Any] = []

    def may_begin(self, worker: SimulatedWorker) -> bool:
        del worker
        return True

    def add_waiting(self, worker: SimulatedWorker) -> None:
        """Adds a worker that may not begin yet. By default, the worker is the last to begin."""
        self.waiting.append(worker)

    def next_ready(self) -> SimulatedWorker | None:
        """Removes and returns the next waiting worker if it may begin. Returns None if no waiting worker may begin."""
        return self.waiting.popleft() if self.waiting and self.may_begin(self.waiting[0]) else None

    def remove_waiting(self, worker: SimulatedWorker) -> None:
        if worker in self.waiting:
            self.waiting.remove(worker)

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        """Begins a worker's step at a time in seconds. Returns the data that the servers send to the worker."""
        del now
        worker.pulled_version = self.version
        self._model.pull(worker)
        return MODEL

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        """Handles a worker's gradient that arrives at a time in seconds. Returns the data that the worker sent."""
        staleness = self._record_push(now, worker.index, worker.pulled_version)
        worker.gradient = self._model.gradient(worker)
        self._model.apply(worker.gradient, self._scale(staleness, self.version) if self._scale else 1.0)
        self.version += 1
        worker.clock += 1
        return GRADIENT

    def forget(self, worker: SimulatedWorker) -> None:
        """Drops a worker's step in flight, after the servers have learned that the worker died."""

    def _record_push(self, now: float, worker: int, pulled_version: int) -> int:
        """Records a push of a gradient that was computed on a version. Returns the staleness in updates."""
        staleness: int = decisions.staleness(self.version, pulled_version)
        self.push_times.append(now)
        self.push_workers.append(worker)
        self.staleness.append(staleness)
        return staleness

    def _accept(self, worker: SimulatedWorker) -> Any:
        """Computes, collects and returns a worker's gradient, which may complete an update of several gradients."""
        gradient = self._model.gradient(worker)
        self._gradients.append(gradient)
        worker.clock += 1
        if decisions.is_complete(len(self._gradients), self._grads_to_wait):
            self._model.apply_mean(self._gradients)
            self.version += 1
            self._gradients.clear()
        return gradient


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule with the settings of `coordinator.updates`. `name` is the rule's name on the command line."""

    name: ClassVar[str]

    def new_run(self, model: SimulatedModel) -> RuleRun:
        """Returns the state of a new training under this rule."""
        raise NotImplementedError

    def __str__(self) -> str:
        settings = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name}({', '.join(settings)})".removesuffix("()")


@dataclasses.dataclass(frozen=True)
class Asynchronous(AsynchronousSettings, Rule):
    """Applies every gradient as it arrives."""

    name: ClassVar[str] = "asynchronous"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return RuleRun(model, self.learning_rate_scale)


@dataclasses.dataclass(frozen=True)
class StaleSynchronous(StaleSynchronousSettings, Rule):
    """Lets workers pull every few steps. In between, a worker also applies its gradients to its own copy."""

    name: ClassVar[str] = "stale_synchronous"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _StaleSynchronousRun(model, self)


class _StaleSynchronousRun(RuleRun):
    """A run of `StaleSynchronous`. Of the waiting workers, the worker with the lowest clock begins first."""

    def __init__(self, model: SimulatedModel, rule: StaleSynchronous) -> None:
        super().__init__(model, rule.learning_rate_scale, rule.grads_to_wait)
        self._frequency = rule.get_model_frequency
        self._max_lead = rule.max_lead
        # The clocks of the active workers, and the greatest clock of all workers.
        self._clocks = IntegerMultiset()
        self._fastest_clock = 0

    def may_begin(self, worker: SimulatedWorker) -> bool:
        if self._max_lead is None:
            return True
        if not worker.is_active:
            worker.clock = decisions.rejoined_clock(worker.clock, self._clocks.minimum(self._fastest_clock))
            self._clocks.add(worker.clock)
            worker.is_active = True
        # The clocks include the worker's own clock, which changes no answer: the slowest worker may always begin.
        may: bool = decisions.may_lead(worker.clock, self._clocks.minimum(worker.clock), self._max_lead)
        return may

    def add_waiting(self, worker: SimulatedWorker) -> None:
        bisect.insort(self.waiting, worker, key=lambda other: other.clock)

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        if decisions.is_pull_due(worker.steps_since_pull, self._frequency):
            worker.steps_since_pull = 0
            return super().begin(worker, now)
        return NOTHING

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        if worker.is_active:
            self._clocks.remove(worker.clock)
            self._clocks.add(worker.clock + 1)
            self._fastest_clock = max(self._fastest_clock, worker.clock + 1)
        worker.steps_since_pull += 1
        if self._grads_to_wait == 1:
            super().push(worker, now)
        else:
            self._record_push(now, worker.index, worker.pulled_version)
            worker.gradient = self._accept(worker)
        self._model.apply_to_own(worker)
        return GRADIENT

    def forget(self, worker: SimulatedWorker) -> None:
        worker.steps_since_pull = 0
        if worker.is_active:
            self._clocks.remove(worker.clock)
            worker.is_active = False


@dataclasses.dataclass(frozen=True)
class Synchronous(SynchronousSettings, Rule):
    """Applies the mean of `grads_to_wait` gradients of the current version, and rejects others. No worker waits."""

    name: ClassVar[str] = "synchronous"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return SynchronousRun(model, grads_to_wait=self.grads_to_wait)


class SynchronousRun(RuleRun):
    """A run of `Synchronous`."""

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        self._record_push(now, worker.index, worker.pulled_version)
        if decisions.is_accepted(self.version, worker.pulled_version, len(self._gradients), self._grads_to_wait):
            self._accept(worker)
        else:
            self.rejected += 1
        return GRADIENT


@dataclasses.dataclass(frozen=True)
class BoundedDelay(BoundedDelaySettings, Rule):
    """Lets a worker begin only if this cannot make any gradient more than `max_delay` updates old."""

    name: ClassVar[str] = "bounded_delay"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _BoundedDelayRun(model, self)


class _BoundedDelayRun(RuleRun):
    """A run of `BoundedDelay`. Either all workers may begin or none, so they begin in the order of their requests."""

    def __init__(self, model: SimulatedModel, rule: BoundedDelay) -> None:
        super().__init__(model, grads_to_wait=rule.grads_to_wait)
        self._max_delay = rule.largest_delay
        self._under_way = IntegerMultiset()

    def may_begin(self, worker: SimulatedWorker) -> bool:
        del worker
        version, under_way = self.version, self._under_way
        before = version * self._grads_to_wait + len(self._gradients) + len(under_way)
        may: bool = decisions.may_start(before, under_way.minimum(version), self._grads_to_wait, self._max_delay)
        return may

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        self._under_way.add(self.version)
        worker.is_under_way = True
        return super().begin(worker, now)

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        self.forget(worker)
        self._record_push(now, worker.index, worker.pulled_version)
        self._accept(worker)
        return GRADIENT

    def forget(self, worker: SimulatedWorker) -> None:
        if worker.is_under_way:
            self._under_way.remove(worker.pulled_version)
            worker.is_under_way = False


@dataclasses.dataclass(frozen=True)
class Delayed(DelayedSettings, Rule):
    """Queues gradients. The first pull after a gradient's delay applies the gradient as one update.

    Gradients that are queued at the end are never applied. A push is recorded when its gradient is applied.
    """

    name: ClassVar[str] = "delayed"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _DelayedRun(model, self.delay)


class _QueuedGradient(NamedTuple):
    """A pushed gradient that is not applied yet. Times are in seconds. In a heap, the first gradient is due first.

    `number` is the position of the push among all pushes. `gradient` is the value that the model returned.
    """

    due_at: float
    number: int
    worker: int
    pushed_at: float
    delay: float
    pulled_version: int
    gradient: Any


class _DelayedRun(RuleRun):
    def __init__(self, model: SimulatedModel, delay: float | Callable[[int, float], float]) -> None:
        super().__init__(model)
        self._delay = delay
        self._pushes = 0
        # A heap, so that a pull looks at only one gradient more than it applies.
        self._queue: list[_QueuedGradient] = []

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        due = []
        while self._queue and decisions.is_delay_over(now, self._queue[0].pushed_at, self._queue[0].delay):
            due.append(heapq.heappop(self._queue))
        for queued in sorted(due, key=lambda queued: queued.number):
            self._record_push(now, queued.worker, queued.pulled_version)
            self._model.apply(queued.gradient)
            self.version += 1
        return super().begin(worker, now)

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        delay = self._delay(worker.index, now) if callable(self._delay) else self._delay
        delay = math.inf if math.isnan(delay) else max(delay, 0.0)
        gradient = self._model.gradient(worker)
        queued = _QueuedGradient(now + delay, self._pushes, worker.index, now, delay, worker.pulled_version, gradient)
        heapq.heappush(self._queue, queued)
        self._pushes += 1
        worker.clock += 1
        return GRADIENT


@dataclasses.dataclass(frozen=True)
class ModelAverage(ModelAverageSettings, Rule):
    """Each worker trains its own model, which is averaged with all others while the worker computes a gradient.

    An averaging counts as a push and as an update.
    """

    name: ClassVar[str] = "model_average"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _ModelAverageRun(model, self)


class _ModelAverageRun(RuleRun):
    def __init__(self, model: SimulatedModel, rule: ModelAverage) -> None:
        super().__init__(model)
        self._rule = rule
        self._fastest_clock = 0

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        rule = self._rule
        worker.is_warming_up = self._fastest_clock < rule.warmup_steps
        transfer = NOTHING
        if worker.is_warming_up or not worker.has_own_model:
            transfer = super().begin(worker, now)
            worker.has_own_model = not worker.is_warming_up
            worker.averaged_at = now
        if decisions.is_average_due(now - worker.averaged_at, rule.period, self._fastest_clock, rule.warmup_steps):
            self._record_push(now, worker.index, worker.pulled_version)
            self.version += 1
            worker.pulled_version = self.version
            worker.averaged_at = now
            self._model.average(worker)
            # A worker that also pulls in this step, once in its life, gets the shared model with the average.
            return MODEL_BOTH_WAYS
        return transfer

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        if worker.is_warming_up:
            transfer = super().push(worker, now)
        else:
            worker.gradient = self._model.gradient(worker)
            self._model.apply_to_own(worker)
            worker.clock += 1
            transfer = NOTHING
        self._fastest_clock = max(self._fastest_clock, worker.clock)
        return transfer

    def forget(self, worker: SimulatedWorker) -> None:
        worker.has_own_model = False
        self._model.leave_out(worker)


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Asynchronous, Synchronous, StaleSynchronous, BoundedDelay, ModelAverage, Delayed)
}
