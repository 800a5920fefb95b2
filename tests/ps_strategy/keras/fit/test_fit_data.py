"""Tests that each example is trained on once per epoch, for all data that `fit` accepts, also from inside an epoch."""

import collections
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import Epochs, arrays, client
from coordinator.ps_strategy.keras.steps import weighted
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.keras import test_sequence_states as sequences

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EXAMPLES = 24
X = np.stack([np.arange(EXAMPLES), np.ones(EXAMPLES)], axis=1).astype("float32")
Y = np.arange(EXAMPLES, dtype="float32")[:, None]
SOURCE = arrays(X, Y)


class CountedModel(keras.Model):
    """A linear model of examples of which the first feature is their number.

    Args:
      examples: how many there are.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.visits = tf.Variable(tf.zeros([examples]), trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        numbers = tf.cast(data[0][:, 0], tf.int32)
        self.visits.assign_add(tf.reduce_sum(tf.one_hot(numbers, self.visits.shape[0]), axis=0))
        return super().train_step(data)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def batches() -> Iterator[Any]:
    yield from ((X[first : first + 4], Y[first : first + 4]) for first in range(0, EXAMPLES, 4))


def own_slices(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return slices().shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)


def nothing(_: tf.distribute.InputContext | None) -> tf.data.Dataset:
    return slices().batch(4).take(0)


@pytest.fixture(scope="module")
def models(strategy: coordinator.ParameterServerStrategy) -> dict[int, CountedModel]:
    """Models by `steps_per_execution`, whose functions are traced for all tests together."""
    with strategy.scope():
        models = {steps: CountedModel(EXAMPLES) for steps in (1, 4)}
        for steps, model in models.items():
            model.compile(keras.optimizers.SGD(1e-5), "mse", steps_per_execution=steps)
            # A backup is restored into a model that has its variables, whichever test comes first.
            model(X[:1])
    return models


@pytest.fixture
def counted(models: dict[int, CountedModel]) -> Callable[..., CountedModel]:
    """Returns a function that returns a model whose counts are zero."""

    def of(steps_per_execution: int = 1) -> CountedModel:
        model = models[steps_per_execution]
        model.visits.assign(tf.zeros([EXAMPLES]))
        model.optimizer.iterations.assign(0)
        return model

    return of


@pytest.fixture
def model(counted: Callable[..., CountedModel]) -> CountedModel:
    return counted()


def assert_visits(model: CountedModel, times: float) -> None:
    np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, times))


DATA: dict[str, Callable[[coordinator.ParameterServerStrategy], dict[str, Any]]] = {
    "arrays": lambda _: {"x": X, "y": Y, "batch_size": 5},
    "source": lambda _: {"x": arrays(X, Y), "batch_size": 5},
    "source of the client": lambda _: {"x": client([*zip(X, Y, strict=True)]), "batch_size": 5},
    "dataset": lambda _: {"x": slices().shuffle(EXAMPLES).batch(5), "shuffle": False},
    "endless dataset": lambda _: {"x": slices().batch(2).repeat(), "steps_per_epoch": 12, "shuffle": False},
    "PyDataset": lambda _: {"x": Batches(workers=2)},
    "dataset function": lambda _: {"x": own_slices},
    "per-worker dataset": lambda strategy: {"x": strategy.distribute_datasets_from_function(own_slices)},
}
DEFAULT = (("source", 4), ("endless dataset", 1), ("PyDataset", 1))
OTHERS = [(name, 1 if (name, 1) not in DEFAULT else 4) for name in DATA]


@pytest.mark.parametrize("cases", [DEFAULT, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_each_example_is_trained_on_once_in_each_epoch(
    strategy: coordinator.ParameterServerStrategy, counted: Callable[..., CountedModel], cases: Any
) -> None:
    for name, steps_per_execution in cases:
        model = counted(steps_per_execution)
        history = model.fit(**DATA[name](strategy), epochs=2, verbose=0)
        np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, 2.0), err_msg=name)
        assert len(history.history["loss"]) == 2, name


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, whenever it does not know the length
def test_data_of_unknown_length_and_generators_are_trained_on_to_their_end(model: CountedModel) -> None:
    model.fit(slices().filter(lambda x, y: x[0] >= 0.0).batch(4), epochs=2, shuffle=False, verbose=0)
    assert_visits(model, 2.0)
    assert int(model.optimizer.iterations) == 12
    model.fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0)
    assert_visits(model, 3.0)


# row 181: the data of the workers runs out
def test_data_that_ends_early_ends_the_epoch_after_its_last_step(counted: Callable[..., CountedModel]) -> None:
    seen: collections.Counter[str] = collections.Counter()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: seen.update(["trained"]))
    callback.on_test_batch_end = lambda *_, **__: seen.update(["evaluated"])
    for data in (own_slices, slices().batch(4)):
        model = counted()
        seen.clear()
        given = {"x": data, "validation_data": data, "steps_per_epoch": 10, "validation_steps": 10}
        with pytest.warns(UserWarning, match="ran out of data"):
            model.fit(**given, epochs=2, shuffle=False, callbacks=[callback], verbose=0)
        # All examples, in six batches.
        assert_visits(model, 2.0)
        assert (seen, int(model.optimizer.iterations)) == ({"trained": 12, "evaluated": 12}, 12)
    # An epoch begins again after the one that took the last data.
    model = counted()
    model.fit(own_slices, steps_per_epoch=6, epochs=2, verbose=0)
    assert_visits(model, 2.0)


def test_endless_data_without_a_number_of_steps_is_refused(model: CountedModel) -> None:
    def endless_fn(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return slices().repeat().batch(8)

    endless = endless_fn(None)
    for data in (endless_fn, endless):
        with pytest.raises(ValueError, match=r"endless.*steps_per_epoch="):
            model.fit(data, shuffle=False, verbose=0)
        with pytest.raises(ValueError, match=r"endless.*validation_steps="):
            model.fit(X, Y, validation_data=data, verbose=0)
        with pytest.raises(ValueError, match=r"endless.*steps="):
            model.evaluate(data, verbose=0)
    # Before the first step, that of the validation data as well.
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match=r"endless.*steps="):
        model.predict(endless, verbose=0)


@pytest.mark.long
def test_validation_data_may_be_of_every_kind(model: CountedModel) -> None:
    for validation_data in ((X, Y), slices().batch(5), own_slices):
        history = model.fit(X, Y, batch_size=11, validation_data=validation_data, verbose=0).history
        expected = float(np.mean((model.predict(X, verbose=0) - Y) ** 2))
        assert history["val_loss"] == pytest.approx([expected], rel=1e-4)
    model.fit(X, Y, batch_size=4, validation_split=0.5, verbose=0)
    np.testing.assert_array_equal(model.visits, np.repeat([4.0, 3.0], EXAMPLES // 2))


def test_sample_weights_and_class_weights_are_applied(model: CountedModel) -> None:
    classes = np.arange(EXAMPLES) % 3
    of_classes, class_weight = np.array([0.0, 1.0, 3.0])[classes], {0: 0.0, 2: 3.0}
    for y in (classes, Y % 3, np.eye(3)[classes]):
        found = weighted((tf.constant(X), tf.constant(y)), tuple(class_weight.items()))[2]
        np.testing.assert_allclose(found, of_classes)
    for given in (
        {"x": X, "y": classes, "batch_size": EXAMPLES, "sample_weight": of_classes},
        {"x": X, "y": classes, "batch_size": EXAMPLES, "class_weight": class_weight},
        {"x": arrays(X, Y % 3), "batch_size": EXAMPLES, "class_weight": class_weight},
        {"x": tf.data.Dataset.from_tensor_slices((X, classes, of_classes)).batch(EXAMPLES)},
    ):
        before = model.predict(X, verbose=0)[:, 0]
        # All in one step, so that the loss is of the weights before it.
        loss = model.fit(**given, shuffle=False, verbose=0).history["loss"]
        assert loss == pytest.approx([np.mean((before - classes) ** 2 * of_classes)], rel=1e-4)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_without_a_step_is_an_error(model: CountedModel) -> None:
    empty = ({"x": nothing}, {"x": nothing, "steps_per_epoch": 2}, {"x": nothing(None)}, {"x": X[:0], "y": Y[:0]})
    for data in empty:
        with pytest.raises(ValueError, match="no batch for this epoch"):
            model.fit(**data, shuffle=False, verbose=0)
    model.fit(slices().batch(4), shuffle=False, verbose=0)
    assert_visits(model, 1.0)


def test_a_dataset_cached_in_a_file_can_be_read_again_after_a_fit_that_ended_early(model, tmp_path):
    gc.collect()
    gc.disable()
    try:
        data = slices().cache(str(tmp_path / "file")).batch(4)
        model.fit(data, steps_per_epoch=2, verbose=0, shuffle=False)
        model.fit(data, verbose=0, shuffle=False)
    finally:
        gc.enable()
    assert model.visits.numpy().tolist() == [2.0] * 8 + [1.0] * 16


class Recorded(keras.callbacks.Callback):
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


def test_fit_goes_on_inside_an_epoch_with_epochs_that_were_restored(
    model: CountedModel, strategy: coordinator.ParameterServerStrategy
) -> None:
    epochs = Epochs(SOURCE, 4, 3, shuffle=3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(epochs, callbacks=[Recorded((1, 2))], verbose=0)
    # The steps that are scheduled go on: those that still wait would train beside the restored epochs.
    strategy.join()
    with strategy.quiet():
        saved = epochs.serialize()
    restored, batches = Epochs(SOURCE, 4, 3, shuffle=3), Recorded()
    restored.deserialize(saved)
    history = model.fit(restored, callbacks=[batches], verbose=0)
    assert_visits(model, 3.0)
    assert history.epoch == [1, 2]
    assert len(batches.begun) == len(batches.ended)
    assert batches.ended == [*((1, batch) for batch in range(batches.begun[0], 6)), *((2, batch) for batch in range(6))]


def test_a_backup_has_the_position_inside_an_epoch(
    model: CountedModel, strategy: coordinator.ParameterServerStrategy, tmp_path: Path
) -> None:
    batches = Recorded()
    for recorded in (Recorded((1, 3)), batches):
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
    epochs = Epochs(SOURCE, EXAMPLES)
    model.fit(epochs, verbose=0)
    with caplog.at_level(logging.WARNING, "coordinator"):
        model.fit(epochs, verbose=0)
    assert "fit has no data left" in caplog.text
    assert_visits(model, 6.0)


def test_a_range_of_several_batches_is_a_turn_of_as_many_steps(model: CountedModel) -> None:
    batches = Recorded()
    model.fit(Epochs(SOURCE, 4, batches_per_range=4), callbacks=[batches], verbose=0)
    assert (int(model.optimizer.iterations), batches.begun) == (6, [0, 4])
    # Read ahead, they are trained on once.
    model.fit(Epochs(SOURCE, 4, 2, shuffle=1, prefetch=2), verbose=0)
    assert_visits(model, 3.0)


def test_arrays_of_other_lengths_are_trained_on_by_the_functions_of_before(
    model: CountedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.fit(X, Y, batch_size=5, verbose=0)

    def traced(self: CountedModel, x: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(CountedModel, "call", traced)
    for size in (17, 11):
        model.fit(X[:size], Y[:size], batch_size=4, verbose=0)
    np.testing.assert_array_equal(model.visits, np.repeat([3.0, 2.0, 1.0], [11, 6, 7]))


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


def test_fit_evaluate_and_predict_wait_for_the_next_worker_while_there_is_none(
    strategy: coordinator.ParameterServerStrategy, shared_cluster: LocalCluster
) -> None:
    with strategy.scope():
        model = sequences.counting_model()
    cluster, [first, second] = strategy.cluster, shared_cluster.spec["worker"]

    def add() -> None:
        wait_until(lambda: cluster.statistics().waiting)
        cluster.add_worker(first)

    # With one worker, the batches of a sequence are in order.
    given: dict[str, Any] = {"batch_size": 1, "verbose": 0}
    try:
        for use in (
            lambda: model.fit(sequences.X, sequences.Y, shuffle=False, **given).history["loss"][0],
            lambda: model.evaluate(sequences.X, sequences.Y, **given),
            lambda: np.abs(model.predict(sequences.X, **given) - sequences.Y).max(),
        ):
            for worker in cluster.workers:
                cluster.remove_worker(worker.index)
            adding = threading.Thread(target=add)
            adding.start()
            assert use() == 0.0
            adding.join()
            sequences.stateful_layers(model)[0].reset_state()
    finally:
        cluster.add_worker(second)
