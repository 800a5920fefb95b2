import os
import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.errors import LaunchError, SettingError
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.image_data import load, load_cifar10


def test_digits_need_no_download() -> None:
    data = load(Experiment())
    assert (data.images.shape, data.images.dtype) == ((1797, 8, 8, 1), np.uint8)
    assert data.images.max() == data.highest
    assert data.shape == (8, 8, 1)
    assert set(data.labels.tolist()) == set(range(10))


def test_cifar10_is_read_from_its_folder(tmp_path: Path) -> None:
    write(tmp_path, 1, batch(12))
    data = load(Experiment(data="cifar10", folder=tmp_path, batch_size=4))
    assert (data.shape, data.highest, len(data.labels)) == ((32, 32, 3), 255, 12)


def test_a_minibatch_must_not_be_larger_than_a_workers_part(tmp_path: Path) -> None:
    write(tmp_path, 1, batch(12))
    with pytest.raises(SettingError, match="batch_size must be at most 4, a worker's part of the images"):
        load(Experiment(data="cifar10", folder=tmp_path, batch_size=5))


def test_without_scikit_learn_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(LaunchError, match=r"The test-bed needs scikit-learn: pip install 'coordinator-tf\[testbed\]'"):
        load(Experiment())


def pickled_by_python_2(content: Any) -> bytes:
    """Returns a pickle as Python 2 wrote it: bytes are text, and NumPy's functions have their former names."""
    modern = pickle.dumps(content, protocol=3)
    starts = [(opcode.name, place) for opcode, _, place in pickletools.genops(modern)]
    parts = []
    for (name, start), (_, end) in zip(starts, [*starts[1:], ("", len(modern))], strict=True):
        first = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T"}.get(name, modern[start : start + 1])
        parts.append(first + modern[start + 1 : end].replace(b"numpy._core", b"numpy.core") if name != "PROTO" else b"")
    return b"\x80\x02" + b"".join(parts)


def write(folder: Path, number: int, content: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"data_batch_{number}").write_bytes(pickled_by_python_2(content))


def batch(count: int = 3, first_label: int = 0) -> dict[bytes, Any]:
    """Returns images with red 10, green 20 and blue 30, except the first pixel of row 2, which is only blue."""
    data = np.repeat(np.array([[10, 20, 30]], np.uint8), 1024, axis=1).repeat(count, axis=0)
    data[:, [32, 1024 + 32]] = 0
    labels = [(first_label + number) % 10 for number in range(count)]
    return {b"batch_label": b"training batch", b"labels": labels, b"data": data, b"filenames": [b"a.png"] * count}


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_all_files_of_a_folder_are_read_in_order(tmp_path: Path, inside: str) -> None:
    for number in (2, 1):
        write(tmp_path / inside, number, batch(first_label=4 * number))
    images, labels = load_cifar10(tmp_path)
    assert (images.shape, images.dtype) == ((6, 32, 32, 3), np.uint8)
    assert labels.dtype == np.uint8
    assert labels.tolist() == [4, 5, 6, 8, 9, 0]
    assert images[0, 0, 0].tolist() == [10, 20, 30]
    assert images[5, 1, 0].tolist() == [0, 0, 30]


def test_pickles_of_newer_python_and_numpy_versions_are_read(tmp_path: Path) -> None:
    modern = pickle.dumps(batch(), protocol=4)
    assert b"numpy._core.multiarray" in modern
    (tmp_path / "data_batch_1").write_bytes(modern)
    assert load_cifar10(tmp_path)[1].tolist() == [0, 1, 2]


class Touch:
    """Creates a file when an unrestricted unpickler loads it."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_would_call_a_function_is_refused_without_calling_it(tmp_path: Path) -> None:
    write(tmp_path, 1, {**batch(), b"more": Touch(tmp_path / "made")})
    with pytest.raises(
        SettingError, match=r"folder has a file data_batch_1 that cannot be read: it asks for \w+.mkdir"
    ):
        load_cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "has no data and labels"),
        ({b"data": batch()[b"data"]}, "has no data and labels"),
        ({**batch(), b"data": batch()[b"data"][:, :-1]}, r"has data of uint8 \[3, 3071\], not uint8 \[N, 3072\]"),
        ({**batch(), b"data": batch()[b"data"] / 255}, r"has data of float64 \[3, 3072\], not uint8 \[N, 3072\]"),
        ({**batch(), b"data": 7}, r"has data of int64 \[\], not uint8 \[N, 3072\]"),
        ({**batch(), b"labels": [0, 1]}, "has no label from 0 to 9 for each of its 3 images"),
        ({**batch(), b"labels": [0, 1, 10]}, "has no label from 0 to 9 for each of its 3 images"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    write(tmp_path, 1, content)
    with pytest.raises(SettingError, match=f"folder has a file data_batch_1 that {reason}"):
        load_cifar10(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickled_by_python_2(batch())[:500])
    with pytest.raises(SettingError, match="data_batch_1 that cannot be read"):
        load_cifar10(tmp_path)


def test_a_folder_without_files_says_which_it_must_have(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="must have the files data_batch_1 to data_batch_5"):
        load_cifar10(tmp_path)
