"""The model that a simulation trains: none, if only time is of interest, or a small model with real gradients.

Gradients are applied at the time and in the order of the simulated cluster.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from coordinator.errors import SettingError
from coordinator.options import check_integer, check_number
from coordinator.simulation.simulated_tasks import SimulatedWorker

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Problem(Protocol):
    """The interface of a problem. Users may write their own problems."""

    @property
    def initial(self) -> Vector:
        """The initial parameters; float64 [parameters]."""

    def gradient(self, parameters: Vector, generator: np.random.Generator) -> Vector:
        """Returns the gradient on a minibatch that the generator chooses; float64 [parameters]."""

    def loss(self, parameters: Vector) -> float:
        """Returns the loss over all data."""


class LogisticRegression:
    """Logistic regression on synthetic data whose features differ much in scale, so that a large rate overshoots.

    Args:
      examples, features: the numbers of examples and of features, each at least 1.
      batch: the number of examples in a minibatch, at least 1.
      seed: the seed of the data.
    """

    def __init__(self, examples: int = 512, features: int = 20, batch: int = 16, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        scale = np.geomspace(1.0, 0.1, features)
        self._inputs = generator.normal(size=(examples, features)) * scale
        weights = generator.normal(size=features) / scale
        chance = 1 / (1 + np.exp(-self._inputs @ weights))
        self._labels = (generator.random(examples) < chance).astype(float)
        self._batch = batch
        self.initial: Vector = np.zeros(features)

    def gradient(self, parameters: Vector, generator: np.random.Generator) -> Vector:
        """See `Problem.gradient`."""
        chosen = generator.integers(len(self._labels), size=self._batch)
        inputs = self._inputs[chosen]
        wrong = 1 / (1 + np.exp(-np.clip(inputs @ parameters, -500, 500))) - self._labels[chosen]
        gradient: Vector = inputs.T @ wrong / self._batch
        return gradient

    def loss(self, parameters: Vector) -> float:
        """Returns the mean cross entropy, in nats."""
        margins = self._inputs @ parameters
        return float(np.mean(np.logaddexp(0.0, margins) - self._labels * margins))


class SmallNetwork:
    """A network with one hidden layer of tanh that classifies points of two half moons.

    Args:
      hidden: the number of units of the hidden layer, at least 1.
      batch: the number of examples in a minibatch, at least 1.
      seed: the seed of the data and of the initial parameters.
    """

    _EXAMPLES = 400

    def __init__(self, hidden: int = 16, batch: int = 32, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        moons = np.arange(self._EXAMPLES) % 2
        angles = np.pi * generator.random(self._EXAMPLES)
        sign = 1 - 2 * moons
        points = np.stack([moons + sign * np.cos(angles), 0.5 * moons + sign * np.sin(angles)], axis=1)
        points += generator.normal(scale=0.15, size=points.shape)
        self._inputs, self._labels = np.concatenate([points, np.ones((self._EXAMPLES, 1))], axis=1), moons.astype(float)
        self._batch = batch
        self._hidden = hidden
        first = generator.normal(size=(3, hidden)) / np.sqrt(3)
        last = generator.normal(size=hidden + 1) / np.sqrt(hidden)
        self.initial: Vector = np.concatenate([first.ravel(), last])

    def gradient(self, parameters: Vector, generator: np.random.Generator) -> Vector:
        """See `Problem.gradient`."""
        chosen = generator.integers(len(self._labels), size=self._batch)
        inputs = self._inputs[chosen]
        hidden, margins = self._run(parameters, inputs)
        wrong = (1 / (1 + np.exp(-np.clip(margins, -500, 500))) - self._labels[chosen]) / self._batch
        to_hidden = np.outer(wrong, self._split(parameters)[1][:-1]) * (1 - hidden**2)
        return np.concatenate([(inputs.T @ to_hidden).ravel(), hidden.T @ wrong, [wrong.sum()]])

    def loss(self, parameters: Vector) -> float:
        """Returns the mean cross entropy, in nats."""
        _, margins = self._run(parameters, self._inputs)
        return float(np.mean(np.logaddexp(0.0, margins) - self._labels * margins))

    def _split(self, parameters: Vector) -> tuple[Vector, Vector]:
        return parameters[: 3 * self._hidden].reshape(3, self._hidden), parameters[3 * self._hidden :]

    def _run(self, parameters: Vector, inputs: Vector) -> tuple[Vector, Vector]:
        first, last = self._split(parameters)
        hidden = np.tanh(inputs @ first)
        return hidden, hidden @ last[:-1] + last[-1]


@dataclasses.dataclass(frozen=True)
class Learning:
    """A problem that is learned by plain gradient descent.

    Attributes:
      problem: an object with `initial`, `gradient` and `loss`; see `Problem`.
      learning_rate: the learning rate, above 0.
      evaluate_every: the number of pushes between two computations of the loss, at least 1.

    Raises:
      SettingError: an attribute has a value that is not allowed.
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
    """The model on the parameter servers, and the workers' copies. In this base class nothing is computed."""

    def pull(self, worker: SimulatedWorker) -> None:
        """Sets the worker's copy to the shared model."""

    def gradient(self, worker: SimulatedWorker) -> Any:
        """Returns the gradient of a worker's copy, on a random minibatch."""

    def apply(self, gradient: Any, scale: float = 1.0) -> None:
        """Applies a gradient to the shared model, with the learning rate times a scale."""

    def apply_mean(self, gradients: Sequence[Any]) -> None:
        """Applies the mean of gradients to the shared model."""

    def apply_to_own(self, worker: SimulatedWorker) -> None:
        """Applies the worker's gradient to its copy. After an averaging, the copy is first set to the average."""

    def average(self, worker: SimulatedWorker) -> None:
        """Adds a worker's change, divided by the number of workers, to the shared model, which its copy gets later."""

    def leave_out(self, worker: SimulatedWorker) -> None:
        """Records that the worker has no copy now."""

    def count_push(self, now: float) -> None:
        """Counts a push at a time in seconds. Evaluates the loss if an evaluation is due."""


class LearningModel(SimulatedModel):
    """A model that learns. `curve` has rows of the time in seconds, the number of pushes, and the loss."""

    def __init__(self, learning: Learning, generator: np.random.Generator) -> None:
        self.parameters: Vector = np.array(learning.problem.initial, dtype=float)
        self.curve: list[tuple[float, int, float]] = []
        self._problem = learning.problem
        self._rate = learning.learning_rate
        self._evaluate_every = learning.evaluate_every
        self._generator = generator
        # Maps a worker's index to the parameters from which the worker's copy has changed since the last averaging.
        self._bases: dict[int, Vector] = {}
        self._pushes = 0
        self._evaluate(0.0)

    def pull(self, worker: SimulatedWorker) -> None:
        # `parameters` is never changed in place, so that no copy is needed.
        worker.parameters = self.parameters

    def gradient(self, worker: SimulatedWorker) -> Vector:
        # A diverging model overflows, which its loss shows.
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
        # A worker that has just pulled has no base yet, and has changed nothing.
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
