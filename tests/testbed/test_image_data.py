import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.image_data import load, load_cifar10


def test_digits_need_no_download() -> None:
    data = load(Experiment())
    assert (data.images.shape, data.images.dtype) == ((1600, 8, 8, 1), np.uint8)
    assert data.images.max() == data.highest
    assert data.shape == (8, 8, 1)
    assert set(data.labels.tolist()) == set(data.held_out_labels.tolist()) == set(range(10))
    assert data.held_out_images.shape == (197, 8, 8, 1)


def test_cifar10_is_read_from_its_folder_and_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    write_binary(tmp_path, "data_batch_1.bin", batch(12))
    data = load(Experiment(data="cifar10", folder=tmp_path, batch_size=3))
    assert (data.shape, data.highest) == ((32, 32, 3), 255)
    assert data.labels.tolist() == list(range(10))
    assert data.held_out_labels.tolist() == [0, 1]


def pickled_by_python_2(content: Any) -> bytes:
    """Returns a pickle as Python 2 wrote it: bytes are text, and NumPy's functions have their former names."""
    modern = pickle.dumps(content, protocol=3)
    starts = [(opcode.name, place) for opcode, _, place in pickletools.genops(modern)]
    parts = []
    for (name, start), (_, end) in zip(starts, [*starts[1:], ("", len(modern))], strict=True):
        first = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T"}.get(name, modern[start : start + 1])
        parts.append(first + modern[start + 1 : end].replace(b"numpy._core", b"numpy.core") if name != "PROTO" else b"")
    return b"\x80\x02" + b"".join(parts)


def write_pickle(folder: Path, number: int, content: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"data_batch_{number}").write_bytes(pickled_by_python_2(content))


def batch(count: int = 3, first_label: int = 0) -> dict[bytes, Any]:
    """Returns images with red 10, green 20 and blue 30, except the first pixel of row 2, which is only blue."""
    data = np.repeat(np.array([[10, 20, 30]], np.uint8), 1024, axis=1).repeat(count, axis=0)
    data[:, [32, 1024 + 32]] = 0
    labels = [(first_label + number) % 10 for number in range(count)]
    return {b"batch_label": b"training batch", b"labels": labels, b"data": data, b"filenames": [b"a.png"] * count}


class Touch:
    """Creates a file when an unrestricted unpickler loads it."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_would_call_a_function_is_refused_without_calling_it(tmp_path: Path) -> None:
    write_pickle(tmp_path, 1, {**batch(), b"more": Touch(tmp_path / "made")})
    with pytest.raises(
        SettingError, match=r"folder has a file data_batch_1 that cannot be read: it asks for \w+.mkdir"
    ):
        load_cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


def write_binary(folder: Path, name: str, content: dict[bytes, Any]) -> None:
    """Writes a file as the published archive has it: of each image a byte for the label, then its row of pixels."""
    folder.mkdir(exist_ok=True)
    labels = np.array(content[b"labels"], np.uint8)[:, None]
    (folder / name).write_bytes(np.concatenate([labels, content[b"data"]], axis=1).tobytes())


def test_files_are_read_in_order_as_binary_and_as_old_and_new_pickles(tmp_path: Path) -> None:
    write_pickle(tmp_path / "cifar-10-batches-py", 2, batch(first_label=8))
    modern = pickle.dumps(batch(first_label=4), protocol=4)
    assert b"numpy._core.multiarray" in modern
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(modern)
    for number in (1, 2):
        write_binary(tmp_path / "binary", f"data_batch_{number}.bin", batch(first_label=4 * number))
    for folder in (tmp_path, tmp_path / "binary"):
        images, labels = load_cifar10(folder)
        assert (images.shape, images.dtype, labels.dtype) == ((6, 32, 32, 3), np.uint8, np.uint8)
        assert labels.tolist() == [4, 5, 6, 8, 9, 0]
        assert images[0, 0, 0].tolist() == [10, 20, 30]
        assert images[5, 1, 0].tolist() == [0, 0, 30]
