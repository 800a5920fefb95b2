"""Small images with labels: scikit-learn's digits, or CIFAR-10 from a folder.

CIFAR-10 is read in its published python format: five pickled files, `data_batch_1` to `data_batch_5`, of 10,000 images
each (https://www.cs.toronto.edu/~kriz/cifar.html). Loading a pickle can call any function; here it may call only those
that create NumPy arrays, which is all that these files need. A file that asks for another function is refused.
"""

import dataclasses
import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np

from coordinator.errors import SettingError
from coordinator.testbed.experiment import Experiment, missing

SIDE, CHANNELS, CLASSES = 32, 3, 10
_VALUES = CHANNELS * SIDE * SIDE

# The names of NumPy 2 and those before: there are files of either kind.
_ALLOWED_FUNCTIONS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
      images: uint8 [N, height, width, channels], from 0 to `highest`.
      labels: uint8 [N], from 0 to 9.
      highest: the value of the brightest possible pixel.
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
    """Loads the images of an experiment.

    Raises:
      SettingError: they cannot be loaded, or are too few for one minibatch per worker.
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
    """Loads the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("scikit-learn") from None
    found = load_digits()
    return ImageData(found.images[..., None].astype(np.uint8), found.target.astype(np.uint8), 16)


class _ArrayUnpickler(pickle.Unpickler):
    """Loads arrays, numbers, text and plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_FUNCTIONS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are loaded")


def load_cifar10(folder: pathlib.Path) -> tuple[Any, Any]:
    """Loads the training images of CIFAR-10.

    Args:
      folder: contains the files `data_batch_*`, or the archive's folder `cifar-10-batches-py` with them.

    Returns:
      Images, uint8 [N, 32, 32, 3], and labels, uint8 [N].

    Raises:
      SettingError: the files are missing or of another format.
    """
    paths = sorted(folder.glob("data_batch_*")) or sorted((folder / "cifar-10-batches-py").glob("data_batch_*"))
    if not paths:
        raise SettingError("folder", f"must have the files data_batch_1 to data_batch_5, {folder} has none of them.")
    parts = [_load_batch(path) for path in paths]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, labels


def _load_batch(path: pathlib.Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            # The published files were written by Python 2, whose text is bytes.
            found = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle fails in any way
        _refuse(path, f"cannot be read: {error}", error)
    if not isinstance(found, dict) or not {b"data", b"labels"} <= set(found):
        _refuse(path, "has no data and labels")
    data, labels = np.asarray(found[b"data"]), np.asarray(found[b"labels"])
    if data.dtype != np.uint8 or data.shape != (len(data), _VALUES):
        _refuse(path, f"has data of {data.dtype} {list(data.shape)}, not uint8 [N, {_VALUES}]")
    if labels.shape != (len(data),) or not np.isin(labels, range(CLASSES)).all():
        _refuse(path, f"has no label from 0 to {CLASSES - 1} for each of its {len(data)} images")
    # A row has all of red, then green, then blue.
    return data.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels.astype(np.uint8)


def _refuse(path: pathlib.Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise SettingError("folder", f"has a file {path.name} that {reason}.") from cause
