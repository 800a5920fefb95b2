"""Tests of the parts of Keras' training loop that the library relies on without a promise of Keras."""

import contextlib
import runpy
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow import trainer
from keras.src.trainers import trainer as base_trainer

from coordinator.ps_strategy.keras.internals import patches as keras_patches

X = np.arange(12, dtype="float32")[:, None]
ADVICE = "Keras' training loop has changed; see coordinator/ps_strategy/keras/internals/patches.py."


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


def test_the_batch_spec_is_known_if_all_but_the_batch_size_is_known() -> None:
    examples = tf.data.Dataset.from_tensor_slices(X)
    for dataset, spec in (
        (examples.batch(5), tf.TensorSpec([None, 1])),
        (examples.batch(5, drop_remainder=True), tf.TensorSpec([5, 1])),
        (examples.padded_batch(5, padded_shapes=[None]), None),
    ):
        assert keras_patches.EpochIterator(lambda dataset: dataset, dataset, {}).batch_spec == spec


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


@pytest.mark.parametrize("version", ["3.15", "3.16"])
def test_the_names_of_two_releases_of_keras_are_found(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_class, operations = keras_patches.Trainer, keras_patches.numpy_operations
    for owner, name in ((base_trainer, "Trainer"), (base_trainer, "BaseTrainer"), (backend, "numpy"), (backend, "ops")):
        monkeypatch.delattr(owner, name, raising=False)
    of_ops = types.SimpleNamespace(numpy=operations)
    names: list[Any] = {
        "3.15": [(base_trainer, "Trainer", trainer_class), (backend, "numpy", operations)],
        "3.16": [(base_trainer, "BaseTrainer", trainer_class), (backend, "ops", of_ops)],
    }[version]
    # The strategy that other tests share has replaced it.
    names.append((trainer, "TFEpochIterator", keras_patches.StockEpochIterator))
    for owner, name, value in names:
        monkeypatch.setattr(owner, name, value, raising=False)
    found = runpy.run_path(keras_patches.__file__)
    assert found["Trainer"] is trainer_class
    assert found["numpy_operations"] is operations
