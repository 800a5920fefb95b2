"""Tests of what the library relies on of Keras' training loop, backups and adapters without a promise of Keras."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from coordinator.ps_strategy.keras.internals import patches as keras_patches
from coordinator.ps_strategy.keras.internals.patches import array_inputs, backups_extended
from coordinator.ps_strategy.keras.range_fits import position_at, save_position

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.arange(12, dtype="float32")[:, None]
ADVICE = "Keras has changed; see coordinator/ps_strategy/keras/internals/patches.py."


class Elsewhere(tf.distribute.OneDeviceStrategy):
    """A strategy whose models are trained by the extension below."""


class Recording:
    """Records the calls that it gets. A feed returns the batches unchanged."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def is_for(self, strategy: Any) -> bool:
        return isinstance(strategy, Elsewhere)

    def compile(self, _: keras.Model, optimizer: Any) -> Any:
        return optimizer

    def epoch_iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> keras_patches.EpochIterator:
        self.calls.append(("data", sorted(arguments)))
        return keras_patches.EpochIterator(lambda data: Feed(data, self.calls), x, arguments)

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, given: dict[str, Any]) -> Iterator[None]:
        self.calls.append(("fit", sorted(given)))
        yield

    def turn_function(self, model: keras.Model, kind: str) -> Callable[[Any], Any]:
        if kind == "predict":
            return lambda batches: self.calls.append(("predict", len(batches))) or batches[0]
        return lambda feed: self._turn(kind, feed)

    def _turn(self, kind: str, feed: Any) -> dict[str, float]:
        self.calls.append((kind, len(next(feed)[0])))
        return {"loss": 1.0}


class Feed:
    def __init__(self, dataset: tf.data.Dataset, calls: list[Any]) -> None:
        self._batches = iter(dataset)
        self._calls = calls

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def wait_finished(self) -> None:
        self._calls.append("wait")


@pytest.fixture(scope="module")
def extension() -> Iterator[Recording]:
    recording = Recording()
    with keras_patches.trainer_extended(recording):
        yield recording


@pytest.fixture
def model(extension: Recording) -> keras.Model:
    extension.calls.clear()
    with Elsewhere("/cpu:0").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    return model


def test_the_loop_takes_its_batches_and_its_functions_from_the_extension(
    model: keras.Model, extension: Recording
) -> None:
    model.fit(X, X, batch_size=3, epochs=2, shuffle=False, validation_data=(X[:4], X[:4]), verbose=0)
    arguments = ["batch_size", "class_weight", "shuffle", "steps_per_epoch", "steps_per_execution", "y"]
    checked, training, validation, *turns = extension.calls
    assert checked == ("fit", ["batch_size", "epochs", "shuffle", "validation_data", "verbose", "x", "y"]), ADVICE
    assert set(arguments) <= set(training[1]), ADVICE
    # Two turns of two batches each, which are awaited before the loop reads their results.
    epoch = [("train", 3), ("train", 3), "wait"]
    evaluation = [("test", 3), "wait"]
    assert [turn for turn in [validation, *turns] if turn[0] != "data"] == 2 * [*epoch, *evaluation], ADVICE


def test_data_that_is_not_on_the_client_passes_through_the_loop(extension: Recording) -> None:
    calls: list[Any] = []
    dataset = tf.data.Dataset.from_tensor_slices(X[:4]).batch(2)
    own = keras_patches.OwnData(dataset.element_spec)
    iterator = keras_patches.EpochIterator(lambda _: Feed(dataset, calls), own, {"steps_per_epoch": None})
    assert iterator.num_batches is None
    assert iterator.batch_spec == tf.TensorSpec([None, 1])
    for _ in range(2):
        turns = 0
        # Without a warning.
        with iterator.catch_stop_iteration():
            for *_, feed in iterator:
                next(feed)
                turns += 1
        assert calls, ADVICE
        iterator.reset()
        calls.clear()
        assert turns == 2, ADVICE


def test_a_model_is_built_without_taking_a_batch(extension: Recording) -> None:
    class Once(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return X[4 * index : 4 * index + 4], X[4 * index : 4 * index + 4]

    with Elsewhere("/cpu:0").scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    extension.calls.clear()
    model.fit(Once(workers=2), shuffle=False, verbose=0)
    assert model.built, ADVICE
    assert [call for call in extension.calls if call[0] == "train"] == [("train", 4)] * 2, ADVICE


def test_models_of_other_strategies_are_trained_as_usual(extension: Recording) -> None:
    extension.calls.clear()
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, X, verbose=0)
    assert model.predict(X, verbose=0).shape == (12, 1)
    assert not extension.calls


def test_the_patch_of_keras_is_undone_unless_others_patched_it_too() -> None:
    def replaced() -> dict[str, Any]:
        names = ["fit", "make_train_function", "make_test_function", "make_predict_function", "_maybe_symbolic_build"]
        return {name: vars(keras.Model).get(name) for name in names} | {"iterator": trainer.TFEpochIterator}

    before = replaced()
    with keras_patches.trainer_extended(Recording()):
        assert all(found is not before[name] for name, found in replaced().items())
    assert replaced() == before
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trainer, "TFEpochIterator", before["iterator"])
        with keras_patches.trainer_extended(Recording()):
            trainer.TFEpochIterator = "another's"
        assert replaced() == before | {"iterator": "another's"}
    assert replaced() == before


class Backups:
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
        extension = Backups(is_for=is_for)
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
