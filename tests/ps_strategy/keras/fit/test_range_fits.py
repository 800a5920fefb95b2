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
from coordinator.data import Epochs, Source, arrays
from coordinator.ps_strategy.keras.steps import weighted
from tests.ps_strategy.keras.fit.counted_model import CountedModel

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = 23
X = np.stack([np.arange(SIZE), np.ones(SIZE)], axis=1).astype("float32")
Y = np.arange(SIZE, dtype="float32")[:, None]


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


@pytest.fixture(scope="module")
def source() -> Source:
    return arrays(X, Y)


class Batches(keras.callbacks.Callback):
    """Lists the batches of all epochs.

    Args:
      interrupted_at: an epoch and a batch after which it raises `KeyboardInterrupt`.
    """

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
    model: CountedModel, source: Source, strategy: coordinator.ParameterServerStrategy
) -> None:
    epochs = Epochs(source, 4, 3, shuffle=3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(epochs, callbacks=[Batches((1, 2))], verbose=0)
    # The steps that are scheduled go on: those that still wait would train beside the restored epochs.
    strategy.join()
    with strategy.quiet():
        saved = epochs.serialize()
    restored, batches = Epochs(source, 4, 3, shuffle=3), Batches()
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


def test_fit_begins_with_the_initial_epoch(model: CountedModel, source: Source) -> None:
    for data in ({"x": source, "batch_size": 6, "epochs": 3}, {"x": Epochs(source, 6, 3)}):
        assert model.fit(**data, initial_epoch=1, verbose=0).epoch == [1, 2]
    fitted = model.fit(X, Y, batch_size=6, epochs=3, initial_epoch=2, verbose=0, validation_data=source)
    assert fitted.epoch == [2]
    assert list(fitted.history) == ["loss", "val_loss"]
    assert visits(model) == [5.0]


def test_epochs_that_are_done_are_not_trained_again(
    model: CountedModel, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = Epochs(source, SIZE)
    model.fit(epochs, verbose=0)
    with caplog.at_level(logging.WARNING, "coordinator"):
        model.fit(epochs, verbose=0)
    assert visits(model) == [1.0]
    assert "fit has no data left" in caplog.text


def test_a_range_of_several_batches_is_a_turn_of_as_many_steps(model: CountedModel, source: Source) -> None:
    batches = Batches()
    model.fit(Epochs(source, 4, batches_per_range=4), callbacks=[batches], verbose=0)
    assert visits(model) == [1.0]
    assert (int(model.optimizer.iterations), batches.begun) == (6, [0, 4])


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"y": Y}, "y cannot be given along with a source"),
        ({"sample_weight": Y[:, 0]}, "sample_weight cannot be given"),
        ({"x": arrays(X, Y, Y), "class_weight": {0: 1.0}}, "class_weight takes data that gives"),
        ({"validation_split": 0.2}, "validation_split cannot be given"),
        ({"steps_per_epoch": 3}, "steps_per_epoch cannot be given"),
        ({"shuffle": "batch"}, "True, False or a seed"),
        ({"x": Epochs(arrays(X, Y), 5), "batch_size": 5}, "batch_size cannot be given along with Epochs"),
        ({"x": Epochs(arrays(X, Y), 5), "epochs": 2}, "epochs cannot be given along with Epochs"),
    ],
)
def test_arguments_that_do_not_go_with_a_source_are_refused(
    model: CountedModel, source: Source, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model.fit(**{"x": source, "verbose": 0, **arguments})


@pytest.mark.long
def test_epochs_that_are_read_ahead_are_trained_once(model: CountedModel) -> None:
    model.fit(Epochs(arrays(X, Y), 4, 2, shuffle=1, prefetch=2), verbose=0)
    np.testing.assert_array_equal(model.visits, np.full(SIZE, 2.0))


CLASSES = np.arange(SIZE) % 3


@pytest.mark.parametrize("y", [CLASSES, Y % 3, np.eye(3)[CLASSES]], ids=["numbers", "column", "one-hot"])
def test_class_weights_are_those_of_keras(y: Any) -> None:
    found = weighted((tf.constant(X), tf.constant(y)), ((0, 0.5), (2, 3.0)))[2]
    np.testing.assert_allclose(found, np.array([0.5, 1.0, 3.0])[CLASSES])


def test_a_source_is_trained_with_class_weights(model: CountedModel) -> None:
    before = model.predict(X, verbose=0)
    weights = {0: 0.0, 1: 2.0, 2: 1.0}
    of_classes = np.array([0.0, 2.0, 1.0] * SIZE)[:SIZE, None]
    data = arrays(X, Y % 3)
    # All in one step, so that the loss is of the weights before it.
    loss = model.fit(data, batch_size=SIZE, shuffle=False, class_weight=weights, verbose=0).history["loss"]
    assert loss == pytest.approx([np.mean((before - Y % 3) ** 2 * of_classes)], rel=1e-4)
