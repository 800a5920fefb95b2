"""Small images with labels: scikit-learn's digits, or CIFAR-10 from a folder."""

import dataclasses
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.testbed.cifar10 import load_cifar10
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.extra import missing


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
      images: uint8 [N, height, width, channels], from 0 to `highest`.
      labels: uint8 [N], from 0 to 9.
      highest: the value of the brightest pixel that there may be.
    """

    images: Any
    labels: Any
    highest: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels


def load(experiment: Experiment) -> ImageData:
    """The images that an experiment asks for.

    Raises:
      SettingError: they are not there, or are too few for one minibatch of each worker.
      LaunchError: scikit-learn is not installed.
    """
    if experiment.folder is not None and experiment.data == "cifar10":
        data = ImageData(*load_cifar10(experiment.folder), 255)
    else:
        data = _digits()
    most = len(data.images) // experiment.most_workers
    if experiment.batch_size > most:
        raise SettingError("batch_size", f"must be at most {most}, a worker's part of the images.")
    return data


def _digits() -> ImageData:
    """1797 handwritten digits of 8 x 8 pixels, which scikit-learn brings along."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("scikit-learn") from None
    found = load_digits()
    return ImageData(found.images[..., None].astype(np.uint8), found.target.astype(np.uint8), 16)
