import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.errors import LaunchError, SettingError
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.image_data import load
from tests.testbed.test_cifar10 import batch, write_binary


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


def test_the_images_of_the_test_are_held_out_where_there_are_any(tmp_path: Path) -> None:
    write_binary(tmp_path, "data_batch_1.bin", batch(12))
    write_binary(tmp_path, "test_batch.bin", batch(2, first_label=5))
    data = load(Experiment(data="cifar10", folder=tmp_path, batch_size=3))
    assert (len(data.labels), data.held_out_labels.tolist()) == (12, [5, 6])


def test_a_minibatch_must_not_be_larger_than_a_workers_part(tmp_path: Path) -> None:
    write_binary(tmp_path, "data_batch_1.bin", batch(12))
    with pytest.raises(SettingError, match="batch_size must be at most 3, a worker's part of the images"):
        load(Experiment(data="cifar10", folder=tmp_path, batch_size=4))


def test_without_scikit_learn_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(LaunchError, match=r"The test-bed needs scikit-learn: pip install 'coordinator-tf\[testbed\]'"):
        load(Experiment())
