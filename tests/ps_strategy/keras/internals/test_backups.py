"""Tests of what is relied on of Keras' `BackupAndRestore`, and of the file beside its own. Uses: test_range_fits.py."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from coordinator.ps_strategy.keras.internals.patches import backups_extended
from coordinator.ps_strategy.keras.range_fits import position_at, save_position

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ADVICE = "Keras' BackupAndRestore has changed; see coordinator/ps_strategy/keras/internals/patches.py."


class Recording:
    def __init__(self, *, is_for: bool) -> None:
        self.is_for = lambda _: is_for
        self.calls: list[str] = []

    @contextlib.contextmanager
    def saving(self, model: keras.Model, folder: str) -> Iterator[None]:
        assert not Path(folder, "training_metadata.json").exists()
        yield
        assert Path(folder, "training_metadata.json").exists(), ADVICE
        self.calls.append("saved")

    def restored(self, model: keras.Model, folder: str, epoch: int) -> int:
        self.calls.append("restored")
        return 1


def test_the_callback_of_keras_saves_and_begins_where_the_extension_says(tmp_path: Path) -> None:
    for is_for, calls, epochs in ((True, ["restored", "saved"], [1]), (False, [], [0, 1])):
        extension = Recording(is_for=is_for)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        with backups_extended(extension):
            history = model.fit(np.ones((2, 1)), np.ones(2), epochs=2, callbacks=[backup], verbose=0)
        assert (extension.calls, history.epoch) == (calls, epochs), ADVICE


def test_the_last_positions_are_found_by_the_updates_of_the_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "backup")
    assert position_at(folder, 0) is None
    for updates in (1, 2, 3, 4, 4):
        save_position(folder, updates, f"after {updates}")
    found: list[Any] = [position_at(folder, updates) for updates in range(6)]
    assert found == [None, None, "after 2", "after 3", "after 4", None]
