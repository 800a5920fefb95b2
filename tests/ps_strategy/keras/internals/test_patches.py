"""Tests of what the library relies on of Keras' training loop, backups and adapters without a promise of Keras."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from coordinator.ps_strategy.keras.internals import patches as keras_patches
from coordinator.ps_strategy.keras.internals.patches import array_inputs
from coordinator.ps_strategy.keras.range_fits import position_at, save_position

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.arange(12, dtype="float32")[:, None]
ADVICE = "Keras has changed; see coordinator/ps_strategy/keras/internals/patches.py."


@pytest.mark.long
def test_models_of_other_strategies_are_trained_as_usual(strategy: Any, tmp_path: Path) -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    assert model.fit(X, X, epochs=2, callbacks=[backup], verbose=0).epoch == [0, 1]
    assert model.predict(X, verbose=0).shape == (12, 1)


def test_a_model_is_built_without_taking_a_batch(strategy: Any) -> None:
    class Once(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[4 * index : 4 * index + 4], X[4 * index : 4 * index + 4]

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(Once(workers=2), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3, ADVICE


def test_the_patch_of_keras_is_undone_unless_others_patched_it_too() -> None:
    def replaced() -> dict[str, Any]:
        names = ["fit", "make_train_function", "make_test_function", "make_predict_function", "_maybe_symbolic_build"]
        return {name: vars(keras.Model).get(name) for name in names} | {"iterator": trainer.TFEpochIterator}

    before = replaced()
    with keras_patches.trainer_extended(None):
        assert all(found is not before[name] for name, found in replaced().items())
    assert replaced() == before
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trainer, "TFEpochIterator", before["iterator"])
        with keras_patches.trainer_extended(None):
            trainer.TFEpochIterator = "another's"
        assert replaced() == before | {"iterator": "another's"}
    assert replaced() == before


def test_the_last_positions_are_found_by_the_updates_of_the_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "backup")
    assert position_at(folder, 0) is None
    for updates in (1, 2, 3, 4, 4):
        save_position(folder, updates, f"after {updates}")
    found: list[Any] = [position_at(folder, updates) for updates in range(6)]
    assert found == [None, None, "after 2", "after 3", "after 4", None]


PAIRS = np.arange(12.0).reshape(6, 2)
LABELS = np.array([0, 1, 0, 1, 0, 1])


def found(x: Any, **arguments: Any) -> Any:
    inputs = array_inputs(x, {"class_weight": None, "steps_per_epoch": None, **arguments})
    assert inputs is not None, ADVICE
    return inputs


def test_arrays_are_those_that_keras_would_train_on() -> None:
    inputs, batch_size = found({"a": PAIRS, "b": tf.constant(PAIRS)}, y=LABELS, class_weight={0: 1.0, 1: 3.0})
    assert batch_size == 32
    features, labels, weights = inputs
    for name in ("a", "b"):
        assert features[name].dtype == np.float32
        np.testing.assert_array_equal(features[name], PAIRS.astype("float32"))
    np.testing.assert_array_equal(labels, LABELS)
    np.testing.assert_array_equal(weights, np.where(LABELS == 1, 3.0, 1.0))
    np.testing.assert_array_equal(found(PAIRS, batch_size=4)[0], PAIRS)
    assert found([PAIRS, PAIRS], y=LABELS, sample_weight=LABELS * 1.0, batch_size=4)[1] == 4


def test_other_data_are_left_to_keras() -> None:
    for x, arguments in (
        (None, {}),
        (PAIRS, {"steps_per_epoch": 2}),
        (tf.data.Dataset.range(3), {}),
        (np.array(["a", "b"]), {}),
        (tf.ragged.constant([[1], [2, 3]]), {}),
        (PAIRS, {"y": tf.sparse.from_dense(PAIRS)}),
    ):
        assert array_inputs(x, {"class_weight": None, **arguments}) is None
    with pytest.raises(ValueError, match="cardinality"):
        array_inputs(PAIRS, {"y": LABELS[:4]})
