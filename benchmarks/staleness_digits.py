"""scikit-learn's handwritten digits, and a small network that learns them."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.model_selection import train_test_split

import coordinator
from coordinator.testbed.image_data import GREY_LEVELS, digits

BATCH_SIZE = 32
_HIDDEN_UNITS = 64


class Digits:
    """1,797 images of 8 x 8 pixels with 16 grey levels: three quarters to train, one quarter held out."""

    def __init__(self) -> None:
        images, labels = digits()
        images = images.reshape(len(images), -1).astype("float32") / GREY_LEVELS
        labels = labels.astype("int64")
        self._images, self._held_out_images, self._labels, self._held_out_labels = train_test_split(
            images, labels, test_size=0.25, random_state=0, stratify=labels
        )

    def minibatches(self, strategy: coordinator.ParameterServerStrategy) -> Iterator[Any]:
        """Returns endless minibatches `(images [32, 64] float32, labels [32] int64)`, in random order."""

        def dataset_fn(_: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = tf.data.Dataset.from_tensor_slices((self._images, self._labels)).cache()
            # All workers see all images, so that a slow worker's share is learnt by the others.
            return dataset.shuffle(len(self._images)).repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(2)

        return iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

    def accuracy(self, model: keras.Model) -> float:
        """Returns the share of the held-out images that a model recognises."""
        return float(np.mean(self._guesses(model, self._held_out_images).argmax(axis=1) == self._held_out_labels))

    def loss(self, model: keras.Model) -> float | None:
        """Returns the mean loss of the training images; None if it is not finite."""
        loss = float(cross_entropy(self._labels, self._guesses(model, self._images)))
        return loss if np.isfinite(loss) else None

    def _guesses(self, model: keras.Model, images: Any) -> Any:
        return model(images).numpy()


def new_model(seed: int) -> keras.Model:
    """Returns a network of one hidden layer, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((64,)), dense(_HIDDEN_UNITS, "relu"), dense(10)])


def cross_entropy(labels: Any, logits: Any) -> Any:
    """Returns the mean loss of some images, a scalar."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
