"""Tests that Keras' callbacks work on parameter servers as in one process."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.callbacks import LambdaCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import coordinator

# Keras reads a learning rate in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(2)
X = RNG.normal(size=(120, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def _variables(model: keras.Model) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


@pytest.fixture(scope="module")
def initial(strategy: coordinator.ParameterServerStrategy) -> tuple[keras.Model, list[Any]]:
    """A model for all tests, so that its functions are traced once, and the initial values of its variables."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.optimizer.build(model.trainable_variables)
    return model, [variable.numpy() for variable in _variables(model)]


@pytest.fixture
def model(initial: tuple[keras.Model, list[Any]]) -> keras.Model:
    """A classifier, compiled with an optimizer that has slots, that has not been trained."""
    model, values = initial
    for variable, value in zip(_variables(model), values, strict=True):
        variable.assign(value)
    model.stop_training = False
    return model


def _fit(model: keras.Model, *callbacks: Any, epochs: int = 3, **arguments: Any) -> dict[str, list[float]]:
    given = {"validation_data": (X, Y), "verbose": 0, **arguments}
    return model.fit(X, Y, batch_size=12, epochs=epochs, callbacks=list(callbacks), **given).history


# row 186: callbacks of batches
def test_callbacks_are_called_once_per_batch_and_epoch_in_order(
    model: keras.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            calls.append(("begin", batch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Plain numbers.
            assert set(json.loads(json.dumps(logs))) == {"loss", "accuracy"}
            calls.append(("end", batch))

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(("test", batch))

    epochs: list[Any] = []
    ends = LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append((epoch, *sorted(logs))))
    _fit(model, Recorder(), ends, epochs=2, verbose=1)
    batches = [(when, batch) for batch in range(10) for when in ("begin", "end")]
    assert calls == 2 * (batches + [("test", batch) for batch in range(10)])
    assert epochs == [(epoch, "accuracy", "loss", "val_accuracy", "val_loss") for epoch in range(2)]
    # The progress bar.
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("Epoch 2/2", "10/10", "accuracy: "))


@pytest.mark.long
def test_the_learning_rate_follows_callbacks(model: keras.Model) -> None:
    rates: list[float] = []
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=100.0)
    seen = LambdaCallback(on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate.value)))
    history = _fit(model, plateau, seen)
    assert rates == pytest.approx([0.02, 0.01, 0.005])
    assert len(history["learning_rate"]) == 3
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.3 / (1 + epoch))
    _fit(model, schedule, epochs=2, validation_data=None)
    assert float(model.optimizer.learning_rate.value) == pytest.approx(0.15)


@pytest.mark.long
def test_callbacks_stop_training_and_save_models(model: keras.Model, tmp_path: Path) -> None:
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, mode="max", restore_best_weights=True)
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    history = _fit(model, stopping, saving, keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), epochs=10)
    # With mode "max" the loss never improves.
    assert len(history["loss"]) == len((tmp_path / "log.csv").read_text().splitlines()) - 1 == 2
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(history["val_loss"][0], rel=1e-5)
    local = keras.models.load_model(tmp_path / "1.keras")
    np.testing.assert_allclose(local.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    assert int(local.optimizer.iterations) == 10
    weights = np.full(len(X), np.nan)
    # The logs that a callback gets may be those of an earlier step.
    assert len(_fit(model, keras.callbacks.TerminateOnNaN(), epochs=5, sample_weight=weights)["loss"]) <= 2


# row 187: TensorBoard
def test_summaries_are_written(model: keras.Model, tmp_path: Path) -> None:
    _fit(model, keras.callbacks.TensorBoard(str(tmp_path), update_freq=5, histogram_freq=1, write_graph=True), epochs=2)

    def scalars(folder: str) -> dict[str, list[int]]:
        events = EventAccumulator(str(tmp_path / folder), size_guidance={"tensors": 0})
        events.Reload()
        return {tag: [event.step for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]}

    train = scalars("train")
    # Keras writes the loss of each fifth step, or of each step in older versions.
    assert (train["epoch_loss"], len(train["batch_loss"]) in (4, 20)) == ([0, 1], True)
    assert scalars("validation")["epoch_accuracy"] == [0, 1]


def test_interrupted_training_is_resumed(
    model: keras.Model, strategy: coordinator.ParameterServerStrategy, tmp_path: Path
) -> None:
    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        _fit(model, keras.callbacks.BackupAndRestore(backup), LambdaCallback(on_epoch_begin=interrupt))
    strategy.join()
    for variable in _variables(model):
        variable.assign(tf.zeros_like(variable.value))
    assert len(_fit(model, keras.callbacks.BackupAndRestore(backup))["loss"]) == 2
    assert int(model.optimizer.iterations) == 30
    assert not Path(backup).exists()
    model._initial_epoch = None  # noqa: SLF001 - Keras leaves it


def test_a_callback_may_call_fit_with_numbers_of_numpy_and_no_epoch(model: keras.Model) -> None:
    def nested(epoch: int, logs: Any) -> None:
        model.fit(X[:24], Y[:24], batch_size=np.int64(12), epochs=np.int64(1), verbose=0, callbacks=[])

    assert len(_fit(model, LambdaCallback(on_epoch_end=nested), epochs=2, validation_data=None)["loss"]) == 2
    assert not _fit(model, epochs=0)
    assert int(model.optimizer.iterations) == 2 * (10 + 2)
