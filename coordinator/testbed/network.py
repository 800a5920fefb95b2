"""The network that the test-bed trains, on real servers as well as in virtual time."""

from typing import Any

import keras
import numpy as np

from coordinator.testbed.image_data import ImageData

CLASSES = 10


def new_network(shape: tuple[int, int, int], seed: int) -> keras.Model:
    """Returns a network with initial weights from a seed.

    Args:
      shape: height, width and channels of an image; each block of the network halves height and width, until 2.
      seed: of the initial weights.

    Returns:
      A model from images, float32 [N, height, width, channels], to logits, float32 [N, 10].
    """
    keras.utils.set_random_seed(seed)
    layers, side, filters = [keras.Input(shape)], min(shape[:2]), 16
    while side > 2:
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            # Trainings are short: means of the last hundred minibatches would still contain the initial ones.
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
        side, filters = side // 2, min(2 * filters, 64)
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(CLASSES)])


def initial_weights(shape: tuple[int, int, int], seed: int) -> list[Any]:
    """Returns the initial weights of the network, trainable or not, as arrays; see `new_network`."""
    weights: list[Any] = new_network(shape, seed).get_weights()
    return weights


def new_loss() -> keras.losses.Loss:
    """Returns the loss function: the mean cross entropy of logits, in nats."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class HeldOut:
    """Images that are not trained on, and a network to predict their classes.

    Args:
      data: the images.
    """

    def __init__(self, data: ImageData) -> None:
        self._network = new_network(data.shape, 0)
        self._images = data.held_out_images.astype(np.float32) / data.highest
        self._labels = data.held_out_labels

    def accuracy(self, weights: Any) -> float:
        """Returns the share of the images, from 0 to 1, whose class a network with some weights predicts."""
        self._network.set_weights(weights)
        logits = self._network.predict(self._images, batch_size=1000, verbose=0)
        return float(np.mean(np.argmax(logits, axis=1) == self._labels))
