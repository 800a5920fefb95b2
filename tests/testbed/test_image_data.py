import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.errors import LaunchError, SettingError
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.image_data import load
from tests.testbed.test_cifar10 import batch, write


def test_digits_need_no_download() -> None:
    data = load(Experiment())
    assert (data.images.shape, data.images.dtype) == ((1797, 8, 8, 1), np.uint8)
    assert data.images.max() == data.highest
    assert data.shape == (8, 8, 1)
    assert set(data.labels.tolist()) == set(range(10))


def test_cifar10_comes_from_its_folder(tmp_path: Path) -> None:
    write(tmp_path, 1, batch(12))
    data = load(Experiment(data="cifar10", folder=tmp_path, batch_size=4))
    assert (data.shape, data.highest, len(data.labels)) == ((32, 32, 3), 255, 12)


def test_a_minibatch_must_not_need_more_than_a_workers_part(tmp_path: Path) -> None:
    write(tmp_path, 1, batch(12))
    with pytest.raises(SettingError, match="batch_size must be at most 4, a worker's part of the images"):
        load(Experiment(data="cifar10", folder=tmp_path, batch_size=5))


def test_without_scikit_learn_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(LaunchError, match=r"The test-bed needs scikit-learn: pip install 'coordinator\[testbed\]'"):
        load(Experiment())
