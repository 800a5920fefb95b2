"""What an update rule is in virtual time: settings that users choose, and a run of the rule, which decides.

    ask    may_begin? -- no --> add_waiting ... next_ready
              | yes
    pull   begin          what the worker computes on, and what is sent to it
    push   push           what the gradient does to the model, and what is sent with it

The engine asks these questions; each rule overrides the answers in which it differs. Decisions are made by
`coordinator.updates.decisions`, the functions that the cluster's own graphs run.
"""

import dataclasses
import enum
from array import array
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from coordinator.simulation.learning import SimulatedModel
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.updates import decisions


class IntegerMultiset:
    """Integers with their minimum, at a cost that does not grow with their number.

    It relies on integers that grow, as clocks and versions do: what is added is at most a little below the minimum.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._size = 0
        self._minimum = 0

    def add(self, value: int) -> None:
        """Adds an integer."""
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
    """What a worker and the servers send each other at the beginning or at the end of a step."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    # There and back, during the computation.
    MODEL_BOTH_WAYS = enum.auto()
    GRADIENT = enum.auto()


# Module attributes: looking up a member of an enumeration costs as much as a decision.
NOTHING, MODEL, MODEL_BOTH_WAYS, GRADIENT = Transfer


class RuleRun:
    """One training under a rule: its state and its decisions.

    In this base class no worker waits, and each gradient is applied as it arrives. A subclass that makes workers wait
    overrides `may_begin`.

    Args:
      model: the model that is trained.
      scale: a function of staleness and version that returns the factor of a gradient's learning rate; None for 1.

    Attributes:
      version: the number of updates so far.
      rejected: the number of gradients that were rejected.
      waiting: the workers that wait to begin, in the order in which they will.
      push_times, push_workers, staleness: the time in seconds, the worker's index and the staleness in updates of every
        push, in the order of arrival at the parameter servers.
    """

    def __init__(self, model: SimulatedModel, scale: Callable[[int, int], float] | None = None) -> None:
        self.version = 0
        self.rejected = 0
        self.waiting: deque[SimulatedWorker] = deque()
        # There are millions: arrays hold them in eight bytes each.
        self.push_times = array("d")
        self.push_workers = array("l")
        self.staleness = array("q")
        self._model = model
        self._scale = scale

    def may_begin(self, worker: SimulatedWorker) -> bool:
        """Returns True if a worker may begin a step."""
        del worker
        return True

    def add_waiting(self, worker: SimulatedWorker) -> None:
        """Adds a worker that may not begin yet; by default, after those that asked before."""
        self.waiting.append(worker)

    def next_ready(self) -> SimulatedWorker | None:
        """Removes and returns the next waiting worker if it may begin; None if not, or if there is none."""
        return self.waiting.popleft() if self.waiting and self.may_begin(self.waiting[0]) else None

    def remove_waiting(self, worker: SimulatedWorker) -> None:
        """Removes a worker that died from those that wait."""
        if worker in self.waiting:
            self.waiting.remove(worker)

    def begin(self, worker: SimulatedWorker, now: float) -> Transfer:
        """Begins a worker's step at a time in seconds; returns what is sent to the worker."""
        del now
        worker.pulled_version = self.version
        self._model.pull(worker)
        return MODEL

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        """Takes the gradient that arrives from a worker at a time in seconds; returns what was sent with it."""
        staleness = self._record_push(now, worker.index, worker.pulled_version)
        worker.gradient = self._model.gradient(worker)
        self._model.apply(worker.gradient, self._scale(staleness, self.version) if self._scale else 1.0)
        self.version += 1
        worker.clock += 1
        return GRADIENT

    def forget(self, worker: SimulatedWorker) -> None:
        """Drops what a worker had in flight: the servers have learned that it died."""

    def _record_push(self, now: float, worker: int, pulled_version: int) -> int:
        """Records a push of a gradient that was computed on a version, and returns its staleness in updates."""
        staleness: int = decisions.staleness(self.version, pulled_version)
        self.push_times.append(now)
        self.push_workers.append(worker)
        self.staleness.append(staleness)
        return staleness


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule with its settings, which are those of `coordinator.updates`.

    Attributes:
      name: the rule's name on the command line.
    """

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
