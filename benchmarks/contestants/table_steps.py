"""Training steps of the recommender with its embedding in plain variables, in a sharded one, or in a dynamic table."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.contestants.criteo_like import ROWS, criteo_like
from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.recommender_model import (
    DEPTH,
    LEARNING_RATE,
    RecommenderModel,
    dense_values,
    descend,
    loss_of_embedded,
)
from benchmarks.contestants.recommender_steps import plain_step
from benchmarks.contestants.sharded_steps import ShardedRecommenderModel
from benchmarks.contestants.side import Side
from coordinator.embeddings import Table

# A server is full when its part of the keys' hashes is, which is not quite half of all keys.
_CAPACITY = ROWS * 5 // 4


class TableSteps:
    """A `Workload` of training steps, as `RecommenderSteps`: `plain 256`, `sharded 256` or `dynamic 256`.

    "sharded" creates the embedding as one variable, which the side's strategy divides. The keys of "dynamic" are the
    rows of the others, so that all update as many.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._steps: dict[str, Any] = {}
        self._meters: dict[str, RateMeter] = {}

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        kind, batch = work.split()
        batch_size = int(batch)
        if work not in self._meters:
            if kind not in self._steps:
                with self._side.scope():
                    self._steps[kind] = _STEPS[kind]()
            step = tf.function(self._steps[kind])
            iterator = self._side.iterator(lambda _: criteo_like(batch_size))
            self._meters[work] = RateMeter(lambda count: self._side.run(step, (iterator,), count))
        return {"rate": batch_size * self._meters[work].rate(seconds)}


def _plain() -> Callable[[Any], None]:
    return plain_step(RecommenderModel())


def _sharded() -> Callable[[Any], None]:
    return plain_step(ShardedRecommenderModel())


def _dynamic() -> Callable[[Any], None]:
    table = Table("categories", DEPTH, _CAPACITY, lambda rows, gradient: rows.assign_sub(LEARNING_RATE * gradient))
    dense = [tf.Variable(value) for value in dense_values()]

    def step(batches: Any) -> None:
        counts, keys, labels = next(batches)
        with tf.GradientTape() as tape:
            loss = loss_of_embedded(table.lookup(keys, training=True), dense, counts, labels)
        gradient, *others = tape.gradient(loss, [table.variable, *dense])
        table.apply_gradients(gradient)
        for variable, other in zip(dense, others, strict=True):
            descend(variable, other)

    return step


_STEPS: dict[str, Callable[[], Callable[[Any], None]]] = {"plain": _plain, "sharded": _sharded, "dynamic": _dynamic}
