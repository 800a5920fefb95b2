"""Tests of `fit` on ranges of data: where it begins and ends, and what it refuses. Losses: test_range_fit_losses.py."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import Epochs, arrays
from coordinator.ps_strategy.keras.steps import weighted
from tests.ps_strategy.keras.fit.counted_model import CountedModel

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = 23
X = np.stack([np.arange(SIZE), np.ones(SIZE)], axis=1).astype("float32")
Y = np.arange(SIZE, dtype="float32")[:, None]
SOURCE = arrays(X, Y)


@pytest.fixture(scope="module")
def initial(strategy: coordinator.ParameterServerStrategy) -> CountedModel:
    with strategy.scope():
        model = CountedModel(SIZE)
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        # A backup is restored into a model that has its variables, whichever test comes first.
        model(X[:1])
    return model


@pytest.fixture
def model(initial: CountedModel) -> CountedModel:
    """A model whose counts are zero. Its functions are traced for all tests together."""
    initial.visits.assign(tf.zeros([SIZE]))
    initial.optimizer.iterations.assign(0)
    return initial


class Batches(keras.callbacks.Callback):
    """Lists the batches of all epochs; after an epoch and batch that are given it raises `KeyboardInterrupt`."""

    def __init__(self, interrupted_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._interrupted_at = interrupted_at
        self.begun: list[int] = []
        self.ended: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended.append((self.epoch, batch))
        if self.ended[-1] == self._interrupted_at:
            raise KeyboardInterrupt


def visits(model: CountedModel) -> list[float]:
    return sorted(set(model.visits.numpy().tolist()))


def test_fit_goes_on_inside_an_epoch_with_epochs_that_were_restored(
    model: CountedModel, strategy: coordinator.ParameterServerStrategy
) -> None:
    epochs = Epochs(SOURCE, 4, 3, shuffle=3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(epochs, callbacks=[Batches((1, 2))], verbose=0)
    # The steps that are scheduled go on: those that still wait would train beside the restored epochs.
    strategy.join()
    with strategy.quiet():
        saved = epochs.serialize()
    restored, batches = Epochs(SOURCE, 4, 3, shuffle=3), Batches()
    restored.deserialize(saved)
    history = model.fit(restored, callbacks=[batches], verbose=0)
    assert visits(model) == [3.0]
    assert history.epoch == [1, 2]
    assert len(batches.begun) == len(batches.ended)
    assert batches.ended == [*((1, batch) for batch in range(batches.begun[0], 6)), *((2, batch) for batch in range(6))]


def test_a_backup_has_the_position_inside_an_epoch(
    model: CountedModel, strategy: coordinator.ParameterServerStrategy, tmp_path: Path
) -> None:
    batches = Batches()
    for recorded in (Batches((1, 3)), batches):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=2)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(X, Y, batch_size=4, epochs=3, callbacks=[backup, recorded], verbose=0)
        # The steps that are scheduled go on: those that still wait would train the restored model.
        strategy.join()
    assert batches.ended[0][0] == 1
    assert 0 < batches.begun[0] == 6 - (len(batches.begun) - 6)
    # The model and the position are of one moment.
    assert int(model.optimizer.iterations) == 18
    model._initial_epoch = None  # noqa: SLF001 - Keras leaves it


def test_fit_begins_with_the_initial_epoch_and_ends_with_the_data(
    model: CountedModel, caplog: pytest.LogCaptureFixture
) -> None:
    for data in ({"x": SOURCE, "batch_size": 6, "epochs": 3}, {"x": Epochs(SOURCE, 6, 3)}):
        assert model.fit(**data, initial_epoch=1, verbose=0).epoch == [1, 2]
    fitted = model.fit(X, Y, batch_size=6, epochs=3, initial_epoch=2, verbose=0, validation_data=SOURCE)
    assert (fitted.epoch, list(fitted.history)) == ([2], ["loss", "val_loss"])
    epochs = Epochs(SOURCE, SIZE)
    model.fit(epochs, verbose=0)
    with caplog.at_level(logging.WARNING, "coordinator"):
        model.fit(epochs, verbose=0)
    assert "fit has no data left" in caplog.text
    assert visits(model) == [6.0]


def test_a_range_of_several_batches_is_a_turn_of_as_many_steps(model: CountedModel) -> None:
    batches = Batches()
    model.fit(Epochs(SOURCE, 4, batches_per_range=4), callbacks=[batches], verbose=0)
    assert (int(model.optimizer.iterations), batches.begun) == (6, [0, 4])
    # Read ahead, they are trained on once.
    model.fit(Epochs(SOURCE, 4, 2, shuffle=1, prefetch=2), verbose=0)
    assert visits(model) == [3.0]


def test_arrays_of_other_lengths_are_trained_on_by_the_functions_of_before(
    model: CountedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.fit(X, Y, batch_size=5, verbose=0)

    def traced(self: CountedModel, x: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(CountedModel, "call", traced)
    for size in (17, 11):
        model.fit(X[:size], Y[:size], batch_size=4, verbose=0)
    np.testing.assert_array_equal(model.visits, np.repeat([3.0, 2.0, 1.0], [11, 6, 6]))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("y cannot be given along with a source", {"y": Y}),
    ("sample_weight cannot be given", {"sample_weight": Y[:, 0]}),
    ("class_weight takes data that gives", {"x": arrays(X, Y, Y), "class_weight": {0: 1.0}}),
    ("validation_split cannot be given", {"validation_split": 0.2}),
    ("steps_per_epoch cannot be given", {"steps_per_epoch": 3}),
    ("True, False or a seed", {"shuffle": "batch"}),
    ("batch_size cannot be given along with Epochs", {"x": Epochs(SOURCE, 5), "batch_size": 5}),
    ("epochs cannot be given along with Epochs", {"x": Epochs(SOURCE, 5), "epochs": 2}),
]


def test_arguments_that_do_not_go_with_a_source_are_refused(model: CountedModel) -> None:
    for words, arguments in REFUSED:
        with pytest.raises(ValueError, match=words):
            model.fit(**{"x": SOURCE, "verbose": 0, **arguments})


def test_a_source_is_trained_with_the_class_weights_of_keras(model: CountedModel) -> None:
    classes = np.arange(SIZE) % 3
    of_classes = np.array([0.5, 1.0, 3.0])[classes]
    for y in (classes, Y % 3, np.eye(3)[classes]):
        found = weighted((tf.constant(X), tf.constant(y)), ((0, 0.5), (2, 3.0)))[2]
        np.testing.assert_allclose(found, of_classes)
    before = model.predict(X, verbose=0)
    given = {"batch_size": SIZE, "shuffle": False, "class_weight": {0: 0.5, 1: 1.0, 2: 3.0}, "verbose": 0}
    # All in one step, so that the loss is of the weights before it.
    loss = model.fit(arrays(X, Y % 3), **given).history["loss"]
    assert loss == pytest.approx([np.mean((before - Y % 3)[:, 0] ** 2 * of_classes)], rel=1e-4)
