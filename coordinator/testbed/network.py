"""The network that the test-bed trains, on real servers as well as in virtual time."""

import keras

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
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
        side, filters = side // 2, min(2 * filters, 64)
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(CLASSES)])


def new_loss() -> keras.losses.Loss:
    """Returns the loss function: the mean cross entropy of logits, in nats."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
