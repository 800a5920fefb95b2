"""CIFAR-10 in its published python format: five pickled files, `data_batch_1` to `data_batch_5`, of 10,000 images each.

A pickle may call any function while it is loaded. These files need none but those that make NumPy arrays, and nothing
else is called: a file that asks for more is refused. (https://www.cs.toronto.edu/~kriz/cifar.html)
"""

import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np

from coordinator.errors import SettingError

SIDE, CHANNELS, CLASSES = 32, 3, 10
_VALUES = CHANNELS * SIDE * SIDE

# By NumPy 2's names and those before it: files of either kind are about.
_MAKERS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}


class _Arrays(pickle.Unpickler):
    """Loads arrays, numbers, text and plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        """What makes an array or a part of it.

        Raises:
          pickle.UnpicklingError: it is something else.
        """
        if (module, name) in _MAKERS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are loaded")


def load_cifar10(folder: pathlib.Path) -> tuple[Any, Any]:
    """The images that are for training.

    Args:
      folder: has the files `data_batch_*`, or the folder `cifar-10-batches-py` with them, as the archive does.

    Returns:
      Images, uint8 [N, 32, 32, 3], and labels, uint8 [N].

    Raises:
      SettingError: they are not there, or are something else.
    """
    paths = sorted(folder.glob("data_batch_*")) or sorted((folder / "cifar-10-batches-py").glob("data_batch_*"))
    if not paths:
        raise SettingError("folder", f"must have the files data_batch_1 to data_batch_5, {folder} has none of them.")
    parts = [_load(path) for path in paths]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, labels


def _load(path: pathlib.Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            # The published files were written by Python 2, whose text is bytes.
            found = _Arrays(file, encoding="bytes").load()
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


def _refuse(path: pathlib.Path, complaint: str, cause: Exception | None = None) -> NoReturn:
    raise SettingError("folder", f"has a file {path.name} that {complaint}.") from cause
