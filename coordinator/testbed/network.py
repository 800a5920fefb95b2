"""The network that is trained: convolutions with batch normalization and ReLU, as the paper's."""

import keras

CLASSES = 10


def new_network(shape: tuple[int, int, int], seed: int) -> keras.Model:
    """A network whose first weights are those of the seed.

    Args:
      shape: height, width and channels of an image; each block of the network halves height and width, until 2.
      seed: of the first weights.

    Returns:
      A model that makes logits, float32 [N, 10], of images, float32 [N, height, width, channels].
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
