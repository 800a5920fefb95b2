"""Tables for tests, and steps that train them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator import ParameterServerLost, ParameterServerStrategy
from coordinator.embeddings import Table

TIMEOUT = 120.0
DIM = 4


def subtract(rows: Any, gradient: Any) -> None:
    """An update function: plain gradient descent."""
    rows.assign_sub(0.5 * gradient)


def make_table(
    strategy: ParameterServerStrategy | None, capacity: int = 1000, optimizer: Any = subtract, **options: Any
) -> Table:
    """Creates a table with rows of four numbers, on parameter servers or, without a strategy, in this process."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        return Table("words", DIM, capacity, optimizer, **options)


def make_step(table: Table) -> Any:
    """Returns a step that looks keys up, and whose gradient for each row is a given one."""

    @tf.function
    def step(keys: Any, gradient: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
            loss = tf.reduce_sum(rows * gradient)
        table.apply_gradients(tape.gradient(loss, table.variable))
        return rows

    return step


class Trainer:
    """Runs one step after the other.

    Args:
      strategy: of the table, if it has one.
      table: what the steps train.
    """

    def __init__(self, strategy: ParameterServerStrategy | None, table: Table) -> None:
        self._strategy = strategy
        self._step = make_step(table)

    def train(self, keys: Any, gradient: Any = 1.0) -> np.ndarray:
        """Runs a step whose gradient for each row that it looks up is `gradient`; returns the rows before it."""
        keys = np.asarray(keys)
        gradient = np.broadcast_to(np.asarray(gradient, np.float32), [*keys.shape, DIM])
        if self._strategy is None:
            return np.asarray(self._step(tf.constant(keys), tf.constant(gradient)))
        # Each worker builds a step anew, which takes time.
        return np.asarray(self._strategy.schedule(self._step, args=(keys, gradient), worker=0).result(TIMEOUT))


def wait_recovered(strategy: ParameterServerStrategy, recovered: Sequence[Any]) -> None:
    """Waits until a recovery has been reported to the callback that appends to `recovered`."""
    while not recovered:
        with contextlib.suppress(TimeoutError, ParameterServerLost):
            strategy.join(1)
