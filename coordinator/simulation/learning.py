"""Learning in virtual time: real gradients, applied when and in the order in which the simulated cluster would."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.problem import Problem, Vector
from coordinator.simulation.simulated_worker import SimulatedWorker


@dataclasses.dataclass(frozen=True)
class Learning:
    """What is learned, and how: plain gradient descent.

    Attributes:
      problem: an object with `initial`, `gradient` and `loss`; see `Problem`.
      learning_rate: above 0.
      evaluate_every: the loss is computed after every so many pushes, at least 1.

    Raises:
      SettingError: one of them is something else.
    """

    problem: Problem
    learning_rate: float = 0.1
    evaluate_every: int = 50

    def __post_init__(self) -> None:
        missing = [name for name in ("initial", "gradient", "loss") if not hasattr(self.problem, name)]
        if missing:
            raise SettingError("problem", f"must have initial, gradient and loss; {', '.join(missing)} is missing.")
        if not (isinstance(self.learning_rate, int | float) and 0 < self.learning_rate < math.inf):
            raise SettingError("learning_rate", f"must be a number above 0, got {self.learning_rate!r}.")
        if not (isinstance(self.evaluate_every, int) and self.evaluate_every >= 1):
            raise SettingError("evaluate_every", f"must be a whole number of at least 1, got {self.evaluate_every!r}.")


class LearningModel(SimulatedModel):
    """A model that learns.

    Args:
      learning: what, and how.
      generator: of random numbers, for minibatches.

    Attributes:
      parameters: the shared model; float64.
      curve: rows of time in seconds, pushes so far, loss.
    """

    def __init__(self, learning: Learning, generator: np.random.Generator) -> None:
        self.parameters: Vector = np.array(learning.problem.initial, dtype=float)
        self.curve: list[tuple[float, int, float]] = []
        self._problem = learning.problem
        self._rate = learning.learning_rate
        self._evaluate_every = learning.evaluate_every
        self._generator = generator
        self._waiting: list[Vector] = []
        self._rows: dict[int, Vector] = {}
        self._pushes = 0
        self._evaluate(0.0)

    def pull(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        # Never changed in place, so a copy is not needed.
        worker.parameters = self.parameters

    def apply(self, worker: SimulatedWorker, scale: float) -> None:
        """See `SimulatedModel`."""
        worker.gradient = self.gradient(worker)
        self.parameters = self.parameters - self._rate * scale * worker.gradient

    def apply_to_own(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        worker.parameters = worker.parameters - self._rate * worker.gradient

    def add(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        self._waiting.append(self.gradient(worker))

    def apply_mean(self) -> None:
        """See `SimulatedModel`."""
        self.parameters = self.parameters - self._rate * np.mean(self._waiting, axis=0)
        self._waiting.clear()

    def gradient(self, worker: SimulatedWorker) -> Vector:
        """See `SimulatedModel`."""
        # A diverging model overflows, which its loss then says.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._problem.gradient(worker.parameters, self._generator)

    def apply_gradient(self, gradient: Vector) -> None:
        """See `SimulatedModel`."""
        self.parameters = self.parameters - self._rate * gradient

    def average(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        self._rows[worker.index] = worker.parameters
        worker.average = self.parameters = np.mean(list(self._rows.values()), axis=0)

    def train_own(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        gradient = self.gradient(worker)
        if worker.average is not None:
            worker.parameters, worker.average = worker.average, None
        worker.parameters = worker.parameters - self._rate * gradient

    def leave_out(self, worker: SimulatedWorker) -> None:
        """See `SimulatedModel`."""
        self._rows.pop(worker.index, None)
        worker.average = None

    def note_push(self, now: float) -> None:
        """See `SimulatedModel`."""
        self._pushes += 1
        if self._pushes % self._evaluate_every == 0:
            self._evaluate(now)

    def _evaluate(self, now: float) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.curve.append((now, self._pushes, float(self._problem.loss(self.parameters))))


def columns(rows: Sequence[tuple[float, ...]], count: int) -> "list[np.ndarray[Any, np.dtype[np.float64]]]":
    """The columns of a table of numbers, so many, also of an empty one."""
    return list(np.array(rows, dtype=float).reshape(-1, count).T)
