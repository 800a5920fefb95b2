"""What averages models, in this process: workers call it in order, as the test says."""

from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex
from coordinator.updates.rules.model_average import AveragingControl, ModelMean

GENERATION = 1


class Control:
    """What decides which changes count; its first generation is `GENERATION`."""

    def __init__(self, name: str) -> None:
        self._control = AveragingControl(tf.Variable(0), f"tests/averaging/{name}")
        self._count = tf.function(self._control.count, autograph=False)
        self.remove = self._control.remove

    def count(self, ids: tf.Tensor, *, is_stored: bool = True) -> tuple[tf.Tensor, bool, bool]:
        """Returns what is counted now, whether the change was counted by this call, and whether it is counted."""
        counted, is_new, is_counted = self._count(ids, [tf.constant(is_stored)])
        return counted, bool(is_new), bool(is_counted)


class Server:
    """A server with some variables, and the mean of models of them."""

    def __init__(self, variables: list[tf.Variable], name: str) -> None:
        self.mean = ModelMean(range(len(variables)), variables, ServerMutex(f"tests/mean/{name}", variables[0].device))
        self._store = tf.function(self.mean.store, autograph=False)
        self._advance = tf.function(self.mean.advance, autograph=False)

    def store(self, change: list[Any], ids: tf.Tensor) -> bool:
        """Returns whether it has stored a change."""
        return bool(self._store([tf.constant(part) for part in change], ids))

    def advance(self, counted: tf.Tensor) -> tuple[list[Any], bool]:
        """Returns the mean, and whether it is of the moment of `counted`."""
        parts, is_of_moment = self._advance(counted)
        return [part.numpy().tolist() for part in parts], bool(is_of_moment)


def ids_of(worker: int, number: int, connection: int = 1, generation: int = GENERATION) -> tf.Tensor:
    """Returns what a worker says of itself and its change."""
    return tf.constant([worker, connection, generation, number], tf.int64)
