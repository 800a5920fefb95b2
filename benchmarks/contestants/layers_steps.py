"""Training steps of eight large layers: they are bound by the messages with the variables and the gradients."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.recommender_model import descend
from benchmarks.contestants.side import Side
from coordinator import updates

BATCH_SIZE = 16
LAYERS, WIDTH = 8, 1024
LEARNING_RATE = 1e-3
# A step takes more than 50 ms.
_FIRST_COUNT = 10
_SEED = 0


class LayersSteps:
    """A `Workload` of steps: `plain` has its own SGD; `32 bits`, `16 bits` and `feedback` pull and push.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        with side.scope():
            self._variables = [tf.Variable(_start(number)) for number in range(LAYERS)]
        self._iterator = side.iterator(lambda _: _batches())
        self._meters: dict[str, RateMeter] = {}

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        if work not in self._meters:
            step = tf.function(self._plain_step() if work == "plain" else self._rule_step(work))
            self._meters[work] = RateMeter(
                lambda count: self._side.run(step, (self._iterator,), count), first_count=_FIRST_COUNT
            )
        return {"rate": BATCH_SIZE * self._meters[work].rate(seconds)}

    def _plain_step(self) -> Callable[[Any], None]:
        def step(batches: Any) -> None:
            for variable, gradient in zip(self._variables, self._gradients(next(batches)), strict=True):
                descend(variable, gradient, LEARNING_RATE)

        return step

    def _rule_step(self, work: str) -> Callable[[Any], None]:
        with self._side.scope():
            rule = updates.Asynchronous(
                descend,
                self._variables,
                use_locking=False,
                embeddings=(),
                learning_rate=LEARNING_RATE,
                transfer_dtype=tf.float32 if work == "32 bits" else tf.bfloat16,
                error_feedback=work == "feedback",
            )

        def step(batches: Any) -> None:
            batch = next(batches)
            with rule.pull() as version:
                gradients = self._gradients(batch)
            rule.push(gradients, version)

        return step

    def _gradients(self, batch: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            values = batch
            for variable in self._variables:
                values = tf.nn.relu(tf.matmul(values, variable))
            loss = tf.reduce_mean((values - batch) ** 2)
        gradients: list[tf.Tensor] = tape.gradient(loss, self._variables)
        return gradients


def _start(number: int) -> tf.Tensor:
    return tf.random.stateless_normal([WIDTH, WIDTH], [_SEED, number], stddev=(2 / WIDTH) ** 0.5)


def _batches() -> tf.data.Dataset:
    """Returns one batch [16, 1024] of float32, endlessly: the pipeline should cost almost nothing."""
    batch = tf.random.stateless_normal([BATCH_SIZE, WIDTH], [_SEED, LAYERS])
    return tf.data.Dataset.from_tensors(batch).cache().repeat().prefetch(2)
