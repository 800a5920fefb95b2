"""Training steps of a small convolutional network of Keras 3 on scikit-learn's handwritten digits, with Adam."""

from typing import Any

import keras
import tensorflow as tf

from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.side import Side
from coordinator.testbed.image_data import GREY_LEVELS, digits

_SIDE = 8
_SEED = 0


class DigitsSteps:
    """A `Workload` of training steps with a minibatch of images, such as `32`, or with one for each replica: `32 x 2`.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        with side.scope():
            model = new_model()
            optimizer = keras.optimizers.Adam(1e-3)
            optimizer.build(model.trainable_variables)
        self._side = side
        self._body = side.replicated(_gradient_step(model, optimizer))
        self._meters: dict[str, RateMeter] = {}

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        batch_size, _, replicas = work.partition(" x ")
        if work not in self._meters:
            self._meters[work] = self._steps(int(batch_size))
        return {"rate": int(batch_size) * int(replicas or 1) * self._meters[work].rate(seconds)}

    def _steps(self, batch_size: int) -> RateMeter:
        @tf.function
        def step(batches: Any) -> None:
            self._body(*next(batches))

        iterator = self._side.iterator(lambda _: minibatches(batch_size))
        return RateMeter(lambda count: self._side.run(step, (iterator,), count))


def new_model() -> keras.Model:
    """Returns two convolutions and two dense layers: some 20,000 weights in eight variables."""
    layers = keras.layers

    def start(number: int) -> keras.initializers.Initializer:
        # The same weights for all contestants, without setting a global seed.
        return keras.initializers.GlorotUniform(seed=_SEED + number)

    return keras.Sequential(
        [
            keras.Input((_SIDE, _SIDE, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu", kernel_initializer=start(0)),
            layers.Conv2D(32, 3, padding="same", activation="relu", kernel_initializer=start(1)),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(32, "relu", kernel_initializer=start(2)),
            layers.Dense(10, kernel_initializer=start(3)),
        ]
    )


def minibatches(batch_size: int) -> tf.data.Dataset:
    """Returns endless shuffled minibatches `(images [batch_size, 8, 8, 1] float32, labels [batch_size] int64)`."""
    images, labels = digits()
    examples = (images.astype("float32") / GREY_LEVELS, labels.astype("int64"))
    dataset = tf.data.Dataset.from_tensor_slices(examples).cache().shuffle(len(images))
    return dataset.repeat().batch(batch_size, drop_remainder=True).prefetch(2)


def _gradient_step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Any:
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step
