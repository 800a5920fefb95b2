"""Small images with labels, some of them held out: scikit-learn's digits, or CIFAR-10 from a folder.

CIFAR-10 is read in its published formats (https://www.cs.toronto.edu/~kriz/cifar.html). Binary files,
`data_batch_1.bin` to `data_batch_5.bin`, are records of a label and 3072 pixels, one byte each. Files of the python
format, `data_batch_1` to `data_batch_5`, are pickles. Loading a pickle can call any function. This module allows only
the functions that create NumPy arrays, which these files need, and refuses a file that asks for another function.
"""

import dataclasses
import math
import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np

from coordinator.errors import SettingError
from coordinator.testbed.experiment import Experiment, missing

SIDE, CHANNELS, CLASSES = 32, 3, 10
_VALUES = CHANNELS * SIDE * SIDE
# The folders in the published archives, and the ends of the files' names in them.
_FORMATS = (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", ""))

# The functions by their names in NumPy 2 and in earlier releases, because there are files of both.
_ALLOWED_FUNCTIONS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}


def load_cifar10(folder: pathlib.Path, kind: str = "data_batch_*") -> tuple[Any, Any]:
    """Loads images of CIFAR-10: uint8 [N, 32, 32, 3], and labels, uint8 [N].

    `folder` contains the files, or the folder of an archive with the files; the binary format is preferred. `kind` is
    "data_batch_*" for training, "test_batch" for the test. Raises SettingError for missing or wrong files.
    """
    for inside, end in _FORMATS:
        for place in (folder, folder / inside):
            # Leaves out other files whose names begin in this way, such as archives.
            if paths := sorted(path for path in place.glob(kind + end) if path.suffix == end):
                parts = [_load_binary(path) if end else _load_pickle(path) for path in paths]
                images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
                return images, labels
    numbered = [kind.replace("*", number) for number in ("1", "5")] if "*" in kind else [kind]
    files = f"the file{'s' * (len(numbered) > 1)} {' to '.join(numbered)}"
    raise SettingError("folder", f"must have {files}, with or without .bin, {folder} has none of them.")


def has_test(folder: pathlib.Path) -> bool:
    """Returns whether a folder also has the images for the test."""
    return any((place / f"test_batch{end}").exists() for inside, end in _FORMATS for place in (folder, folder / inside))


def _load_binary(path: pathlib.Path) -> tuple[Any, Any]:
    try:
        found = np.fromfile(path, np.uint8)
    except OSError as error:
        _refuse(path, f"cannot be read: {error}", error)
    if not found.size or found.size % (1 + _VALUES):
        _refuse(path, f"has {found.size} bytes, not records of {1 + _VALUES}")
    records = found.reshape(-1, 1 + _VALUES)
    return _checked(path, records[:, 1:], records[:, 0])


class _ArrayUnpickler(pickle.Unpickler):
    """Loads arrays, numbers, text and plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_FUNCTIONS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are loaded")


def _load_pickle(path: pathlib.Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            # The published files were written by Python 2, whose text is bytes.
            found = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle fails in any way
        _refuse(path, f"cannot be read: {error}", error)
    if not isinstance(found, dict) or not {b"data", b"labels"} <= set(found):
        _refuse(path, "has no data and labels")
    return _checked(path, np.asarray(found[b"data"]), np.asarray(found[b"labels"]))


def _checked(path: pathlib.Path, data: Any, labels: Any) -> tuple[Any, Any]:
    """Returns images and labels; raises SettingError for wrong shapes or dtypes."""
    if data.dtype != np.uint8 or data.shape != (len(data), _VALUES):
        _refuse(path, f"has data of {data.dtype} {list(data.shape)}, not uint8 [N, {_VALUES}]")
    if labels.shape != (len(data),) or not np.isin(labels, range(CLASSES)).all():
        _refuse(path, f"has no label from 0 to {CLASSES - 1} for each of its {len(data)} images")
    # A row has all values of red, then of green, then of blue.
    return data.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels.astype(np.uint8)


def _refuse(path: pathlib.Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise SettingError("folder", f"has a file {path.name} that {reason}.") from cause


# The value of the brightest pixel of the digits.
GREY_LEVELS = 16
# The number of digits that are held out. The remaining digits are a minibatch of 100 for each of 16 workers.
_HELD_OUT_DIGITS = 197
# The share of CIFAR-10's images for training that is held out if there are no images for the test.
_HELD_OUT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
      images: uint8 [N, height, width, channels], from 0 to `highest`.
      labels: uint8 [N], from 0 to 9.
      highest: the value of the brightest possible pixel.
      held_out_images, held_out_labels: not used for training, but to measure how well a network predicts.
    """

    images: Any
    labels: Any
    highest: int
    held_out_images: Any
    held_out_labels: Any

    @classmethod
    def holding_out(cls, count: int, images: Any, labels: Any, highest: int) -> "ImageData":
        """Returns data with the last `count` images held out."""
        return cls(images[:-count], labels[:-count], highest, images[-count:], labels[-count:])

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.images.shape[1:]
        return height, width, channels


def load(experiment: Experiment) -> ImageData:
    """Loads the images of an experiment. Raises LaunchError if scikit-learn is not installed.

    Raises SettingError if the images cannot be loaded, or are too few for one minibatch per worker.
    """
    if experiment.folder is not None and experiment.data == "cifar10":
        images, labels = load_cifar10(experiment.folder)
        if has_test(experiment.folder):
            data = ImageData(images, labels, 255, *load_cifar10(experiment.folder, "test_batch"))
        else:
            data = ImageData.holding_out(math.ceil(_HELD_OUT_SHARE * len(images)), images, labels, 255)
    else:
        data = ImageData.holding_out(_HELD_OUT_DIGITS, *digits(), GREY_LEVELS)
    most = len(data.images) // experiment.most_workers
    if max(descent.batch_size for descent in experiment.descents) > most:
        raise SettingError("batch_size", f"must be at most {most}, a worker's part of the images.")
    return data


def digits() -> tuple[Any, Any]:
    """Loads scikit-learn's handwritten digits: images, uint8 [1797, 8, 8, 1], and labels, uint8 [1797].

    Pixels are from 0 to `GREY_LEVELS`. Raises LaunchError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("scikit-learn") from None
    found = load_digits()
    return found.images[..., None].astype(np.uint8), found.target.astype(np.uint8)
