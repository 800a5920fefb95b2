"""Small images with labels, some of them held out: scikit-learn's digits, or CIFAR-10 from a folder."""

import dataclasses
import math
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.testbed.cifar10 import has_test, load_cifar10
from coordinator.testbed.experiment import Experiment, missing

# How many of the digits are held out. What is left is a minibatch of 100 for each of 16 workers.
_HELD_OUT_DIGITS = 197
# The share of CIFAR-10's images for training that is held out if there are none for the test.
_HELD_OUT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
      images: uint8 [N, height, width, channels], from 0 to `highest`.
      labels: uint8 [N], from 0 to 9.
      highest: the value of the brightest possible pixel.
      held_out_images, held_out_labels: those that are not trained on, but tell how well a network predicts.
    """

    images: Any
    labels: Any
    highest: int
    held_out_images: Any
    held_out_labels: Any

    @classmethod
    def holding_out(cls, count: int, images: Any, labels: Any, highest: int) -> "ImageData":
        """Returns data with the last images, of a number, held out."""
        return cls(images[:-count], labels[:-count], highest, images[-count:], labels[-count:])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels


def load(experiment: Experiment) -> ImageData:
    """Loads the images of an experiment.

    Raises:
      SettingError: they cannot be loaded, or are too few for one minibatch per worker.
      LaunchError: scikit-learn is not installed.
    """
    if experiment.folder is not None and experiment.data == "cifar10":
        images, labels = load_cifar10(experiment.folder)
        if has_test(experiment.folder):
            data = ImageData(images, labels, 255, *load_cifar10(experiment.folder, "test_batch"))
        else:
            data = ImageData.holding_out(math.ceil(_HELD_OUT_SHARE * len(images)), images, labels, 255)
    else:
        data = _digits()
    most = len(data.images) // experiment.most_workers
    if max(descent.batch_size for descent in experiment.descents) > most:
        raise SettingError("batch_size", f"must be at most {most}, a worker's part of the images.")
    return data


def _digits() -> ImageData:
    """Loads the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("scikit-learn") from None
    found = load_digits()
    images, labels = found.images[..., None].astype(np.uint8), found.target.astype(np.uint8)
    return ImageData.holding_out(_HELD_OUT_DIGITS, images, labels, 16)
