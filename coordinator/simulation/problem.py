"""Problems to learn in virtual time: small models in NumPy, whose gradients take microseconds."""

from typing import Any, Protocol

import numpy as np

# A vector of float64.
Vector = np.ndarray[Any, np.dtype[np.float64]]


class Problem(Protocol):
    """What a problem must have, a user's own included."""

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
      examples, features: the size of the data, each at least 1.
      batch: examples in a minibatch, at least 1.
      seed: of the data.
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
      hidden: units of the hidden layer, at least 1.
      batch: examples in a minibatch, at least 1.
      seed: of the data and of the initial parameters.
    """

    _EXAMPLES = 400

    def __init__(self, hidden: int = 16, batch: int = 32, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self._inputs, self._labels = _two_moons(self._EXAMPLES, generator)
        self._batch = batch
        self._hidden = hidden
        first = generator.normal(size=(3, hidden)) / np.sqrt(3)
        last = generator.normal(size=hidden + 1) / np.sqrt(hidden)
        self.initial: Vector = np.concatenate([first.ravel(), last])

    def gradient(self, parameters: Vector, generator: np.random.Generator) -> Vector:
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


def _two_moons(examples: int, generator: np.random.Generator) -> tuple[Vector, Vector]:
    """Returns points on two interleaving half circles, with a column of ones, and the circle of each."""
    labels = np.arange(examples) % 2
    angles = np.pi * generator.random(examples)
    sign = 1 - 2 * labels
    points = np.stack([labels + sign * np.cos(angles), 0.5 * labels + sign * np.sin(angles)], axis=1)
    noisy = points + generator.normal(scale=0.15, size=points.shape)
    return np.concatenate([noisy, np.ones((examples, 1))], axis=1), labels.astype(float)
