"""A training small enough for tests: a model whose weights and step a test sets, and its checkpoints."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from coordinator import SidecarEvaluator
from coordinator.evaluation import EvaluationResult

DEADLINE = 60.0


class Spread(keras.metrics.Metric):
    """A metric whose result is a dict."""

    def __init__(self, name: str = "spread"):
        super().__init__(name=name)
        self._mean = keras.metrics.Mean()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self._mean.update_state(y_pred)

    def result(self) -> dict[str, Any]:
        return {"low": self._mean.result() - 1.0, "high": self._mean.result() + 1.0}

    def reset_state(self) -> None:
        self._mean.reset_state()


def build_model(units: int = 3, compiled: bool = True, layers: int = 1) -> keras.Sequential:
    """Returns a model with inputs of shape (batch, 4) and outputs of shape (batch, 1)."""
    hidden = [keras.layers.Dense(units) for _ in range(layers)]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    if compiled:
        # For a few batches, tracing takes longer than it saves.
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae", Spread()], run_eagerly=True)
    return model


def build_data() -> tf.data.Dataset:
    """Returns eight rows in two batches."""
    inputs = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
    return tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1, keepdims=True))).batch(4)


class TinyTraining:
    """A client that trains `model` and writes checkpoints with a `CheckpointManager`."""

    def __init__(self, directory: Path, user_step: tf.Variable | None = None, keep: int = 5):
        self.model = build_model()
        counter = {} if user_step is None else {"step": user_step}
        checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer, **counter)
        self.manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=keep)

    def train_to(self, step: int) -> None:
        """Sets weights that differ from those of every other step."""
        for index, weight in enumerate(self.model.weights):
            weight.assign(np.full(weight.shape, 0.01 * step + 0.1 * index, dtype=np.float32))
        self.model.optimizer.iterations.assign(step)

    def save(self, step: int) -> str:
        self.train_to(step)
        return self.manager.save()

    def metrics(self) -> dict[str, float]:
        return self.model.evaluate(build_data(), verbose=0, return_dict=True)


def build_evaluator(directory: Path, **settings: Any) -> SidecarEvaluator:
    """Returns an evaluator. Its metric is the step, unless `settings` has another `evaluate`; None is slower."""
    quick = {"evaluate": lambda step: {"loss": step}}
    model = settings.pop("model", None) or build_model()
    return SidecarEvaluator(model, build_data(), directory, **(quick | settings))


def same_weights(first: keras.Model, second: keras.Model) -> bool:
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def in_turn(*actions: Callable[[], Any]) -> Callable[[EvaluationResult], Any]:
    """Returns an `on_evaluation` that does one of these after each evaluation."""
    left = iter(actions)
    return lambda _: next(left, int)()


class Logged(logging.Handler):
    """A context in which `act` is called when the library first logs a text. `messages` are all with the text."""

    def __init__(self, text: str, act: Callable[[], Any]):
        super().__init__(logging.INFO)
        self._text, self._act = text, act
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.messages.append(record.getMessage())
            if len(self.messages) == 1:
                self._act()

    def __enter__(self) -> Self:
        logging.getLogger("coordinator").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("coordinator").removeHandler(self)
