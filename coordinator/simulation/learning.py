"""What is trained in virtual time: nothing, if only time is of interest, or a small model with real gradients.

Gradients are applied when, and in the order in which, the simulated cluster would apply them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.setting_checks import check_integer, check_number
from coordinator.simulation.problem import Problem, Vector
from coordinator.simulation.simulated_worker import SimulatedWorker


@dataclasses.dataclass(frozen=True)
class Learning:
    """What is learned, by plain gradient descent.

    Attributes:
      problem: an object with `initial`, `gradient` and `loss`; see `Problem`.
      learning_rate: above 0.
      evaluate_every: the number of pushes between two computations of the loss, at least 1.

    Raises:
      SettingError: one of them is not allowed.
    """

    problem: Problem
    learning_rate: float = 0.1
    evaluate_every: int = 50

    def __post_init__(self) -> None:
        missing = [name for name in ("initial", "gradient", "loss") if not hasattr(self.problem, name)]
        if missing:
            raise SettingError("problem", f"must have initial, gradient and loss; {', '.join(missing)} is missing.")
        check_number("learning_rate", self.learning_rate, above=0)
        check_integer("evaluate_every", self.evaluate_every, minimum=1)


class SimulatedModel:
    """The model on the parameter servers, and the workers' copies of it. In this base class nothing is computed."""

    def pull(self, worker: SimulatedWorker) -> None:
        """Sets the worker's copy to the shared model."""

    def gradient(self, worker: SimulatedWorker) -> Any:
        """Returns the gradient of a worker's copy, on a random minibatch."""

    def apply(self, gradient: Any, scale: float = 1.0) -> None:
        """Applies a gradient to the shared model, with the learning rate times a scale."""

    def apply_mean(self, gradients: Sequence[Any]) -> None:
        """Applies the mean of gradients to the shared model."""

    def apply_to_own(self, worker: SimulatedWorker) -> None:
        """Applies the worker's gradient to its copy, or to the mean to which its last averaging has moved that."""

    def average(self, worker: SimulatedWorker) -> None:
        """Adds the worker's change, divided by the number of workers, to the shared model, where its copy moves."""

    def leave_out(self, worker: SimulatedWorker) -> None:
        """Records that the worker has no copy any more."""

    def count_push(self, now: float) -> None:
        """Counts a push at a time in seconds, and evaluates the loss if it is due."""


class LearningModel(SimulatedModel):
    """A model that learns.

    Args:
      learning: the problem and the learning rate.
      generator: random numbers for minibatches.

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
        # From where each worker's copy was changed.
        self._bases: dict[int, Vector] = {}
        self._pushes = 0
        self._evaluate(0.0)

    def pull(self, worker: SimulatedWorker) -> None:
        # Never changed in place, so no copy is needed.
        worker.parameters = self.parameters

    def gradient(self, worker: SimulatedWorker) -> Vector:
        # A diverging model overflows; its loss shows that.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._problem.gradient(worker.parameters, self._generator)

    def apply(self, gradient: Vector, scale: float = 1.0) -> None:
        self.parameters = self.parameters - self._rate * scale * gradient

    def apply_mean(self, gradients: Sequence[Vector]) -> None:
        self.apply(np.mean(gradients, axis=0))

    def apply_to_own(self, worker: SimulatedWorker) -> None:
        if worker.average is not None:
            worker.parameters, worker.average = worker.average, None
        worker.parameters = worker.parameters - self._rate * worker.gradient

    def average(self, worker: SimulatedWorker) -> None:
        # One that has just pulled has changed nothing.
        change = worker.parameters - self._bases.setdefault(worker.index, worker.parameters)
        self.parameters = self.parameters + change / len(self._bases)
        self._bases[worker.index] = worker.average = self.parameters

    def leave_out(self, worker: SimulatedWorker) -> None:
        self._bases.pop(worker.index, None)
        worker.average = None

    def count_push(self, now: float) -> None:
        self._pushes += 1
        if self._pushes % self._evaluate_every == 0:
            self._evaluate(now)

    def _evaluate(self, now: float) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.curve.append((now, self._pushes, float(self._problem.loss(self.parameters))))
