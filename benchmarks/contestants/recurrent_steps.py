"""Training steps of recurrent models of Keras 3 on made-up sequences, with Adam: a loop of one's own, and `fit`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.side import Side

BATCH_SIZE = 32
_STEPS = 30
_FEATURES = 8
_UNITS = 32
_SEQUENCES = 4096
_SEED = 0


class RecurrentSteps:
    """A `Workload` whose functions are named by a layer, "LSTM" or "GRU", followed by " fit" for `fit`.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._meters: dict[str, RateMeter] = {}

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        if work not in self._meters:
            layer, _, fit = work.partition(" ")
            self._meters[work] = self._fit(layer) if fit else self._loop(layer)
        return {"rate": BATCH_SIZE * self._meters[work].rate(seconds)}

    def _loop(self, layer: str) -> RateMeter:
        with self._side.scope():
            model = new_model(layer)
            optimizer = keras.optimizers.Adam(1e-3)
            optimizer.build(model.trainable_variables)

        def body(sequences: tf.Tensor, sums: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(sequences, training=True) - sums))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        replicated = self._side.replicated(body)

        @tf.function
        def step(batches: Any) -> None:
            replicated(*next(batches))

        iterator = self._side.iterator(lambda _: minibatches())
        return RateMeter(lambda count: self._side.run(step, (iterator,), count))

    def _fit(self, layer: str) -> RateMeter:
        with self._side.scope():
            model = new_model(layer)
            model.compile(keras.optimizers.Adam(1e-3), "mse")
        return RateMeter(lambda count: model.fit(minibatches(), steps_per_epoch=count, verbose=0))


def new_model(layer: str) -> keras.Model:
    """Returns a recurrent layer of 32 units over 30 time steps, and a dense one: five variables, or four."""
    start = keras.initializers.GlorotUniform
    return keras.Sequential(
        [
            keras.Input((_STEPS, _FEATURES)),
            getattr(keras.layers, layer)(_UNITS, kernel_initializer=start(_SEED), recurrent_initializer=start(_SEED)),
            keras.layers.Dense(1, kernel_initializer=start(_SEED)),
        ]
    )


def minibatches() -> tf.data.Dataset:
    """Returns endless minibatches `(sequences [32, 30, 8], sums [32, 1])` of float32."""
    sequences = np.random.default_rng(_SEED).random((_SEQUENCES, _STEPS, _FEATURES), np.float32)
    sums = sequences.sum((1, 2))[:, np.newaxis] / (_STEPS * _FEATURES)
    dataset = tf.data.Dataset.from_tensor_slices((sequences, sums)).cache().repeat()
    return dataset.batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
