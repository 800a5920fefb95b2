"""Tests that each example is trained on once per epoch, for every kind of data that `fit` accepts."""

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from tests.program_runner import ProgramRunner
from tests.ps_strategy.keras.fit.counted_model import CountedModel

EXAMPLES = 24
X = np.stack([np.arange(EXAMPLES), np.ones(EXAMPLES)], axis=1).astype("float32")
Y = np.arange(EXAMPLES, dtype="float32")[:, None]


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
    return models


def counted(models: dict[int, CountedModel], steps_per_execution: int = 1) -> CountedModel:
    """Returns a model whose counts are zero."""
    model = models[steps_per_execution]
    model.visits.assign(tf.zeros([EXAMPLES]))
    model.optimizer.iterations.assign(0)
    return model


DATA: dict[str, Callable[[coordinator.ParameterServerStrategy], dict[str, Any]]] = {
    "arrays": lambda _: {"x": X, "y": Y, "batch_size": 5},
    "source": lambda _: {"x": coordinator.data.arrays(X, Y), "batch_size": 5},
    "tensors": lambda _: {"x": tf.constant(X), "y": tf.constant(Y), "batch_size": 5},
    "dataset": lambda _: {"x": slices().shuffle(EXAMPLES).batch(5), "shuffle": False},
    "endless dataset": lambda _: {"x": slices().batch(2).repeat(), "steps_per_epoch": 12, "shuffle": False},
    "PyDataset": lambda _: {"x": Batches(workers=2)},
    "dataset function": lambda _: {"x": own_slices},
    "per-worker dataset": lambda strategy: {"x": strategy.distribute_datasets_from_function(own_slices)},
}
# Arrays become tensors, and a dataset function becomes a per-worker dataset.
DEFAULT = {"arrays-1", "source-4", "dataset-4", "endless dataset-1", "PyDataset-1"}


@pytest.mark.parametrize(
    ("data", "steps_per_execution"),
    [
        pytest.param(data, steps, id=case, marks=() if case in DEFAULT else pytest.mark.long)
        for name, data in DATA.items()
        for steps in (1, 4)
        for case in [f"{name}-{steps}"]
    ],
)
def test_each_example_is_trained_on_once_in_each_epoch(
    strategy: coordinator.ParameterServerStrategy,
    models: dict[int, CountedModel],
    data: Callable[[coordinator.ParameterServerStrategy], dict[str, Any]],
    steps_per_execution: int,
) -> None:
    model = counted(models, steps_per_execution)
    history = model.fit(**data(strategy), epochs=2, verbose=0)
    np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, 2.0))
    assert len(history.history["loss"]) == 2


def test_a_dataset_of_unknown_length_is_trained_on_to_its_end(models: dict[int, CountedModel]) -> None:
    model = counted(models)
    with warnings.catch_warnings():
        # Keras warns at the end of any data whose length it does not know.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(slices().filter(lambda x, y: x[0] >= 0.0).batch(4), epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, 2.0))
    assert int(model.optimizer.iterations) == 12


def test_a_generator_is_trained_on_to_its_end(models: dict[int, CountedModel]) -> None:
    model = counted(models)
    model.fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.visits, np.ones(EXAMPLES))


@pytest.mark.long
def test_steps_per_epoch_works_with_distributed_datasets(
    models: dict[int, CountedModel],
) -> None:
    model = counted(models)
    model.fit(lambda context: own_slices(context).repeat(), steps_per_epoch=9, epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 27


class Counted(keras.callbacks.Callback):
    """Counts the batches of training and of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.evaluated = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trained += 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.evaluated += 1


# row 181: the data of the workers runs out
def test_data_that_ends_early_ends_the_epoch_after_its_last_step(models: dict[int, CountedModel]) -> None:
    for data in (own_slices, slices().batch(4)):
        model, counted_batches = counted(models), Counted()
        with pytest.warns(UserWarning, match="ran out of data"):
            model.fit(
                data,
                steps_per_epoch=10,
                epochs=2,
                validation_data=data,
                validation_steps=10,
                shuffle=False,
                callbacks=[counted_batches],
                verbose=0,
            )
        # All examples, in six batches.
        np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, 2.0))
        assert (counted_batches.trained, counted_batches.evaluated, int(model.optimizer.iterations)) == (12, 12, 12)


def test_an_epoch_begins_again_after_the_one_that_took_the_last_data(models: dict[int, CountedModel]) -> None:
    model = counted(models)
    model.fit(own_slices, steps_per_epoch=6, epochs=3, verbose=0)
    np.testing.assert_array_equal(model.visits, np.full(EXAMPLES, 3.0))


def test_endless_data_without_a_number_of_steps_is_refused(models: dict[int, CountedModel]) -> None:
    model = counted(models)

    def endless_fn(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return slices().repeat().batch(8)

    for data in (endless_fn, slices().repeat().batch(8)):
        with pytest.raises(ValueError, match=r"endless.*steps_per_epoch="):
            model.fit(data, shuffle=False, verbose=0)
        with pytest.raises(ValueError, match=r"endless.*validation_steps="):
            model.fit(X, Y, validation_data=data, verbose=0)
        with pytest.raises(ValueError, match=r"endless.*steps="):
            model.evaluate(data, verbose=0)
    # Before the first step, that of the validation data as well.
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match=r"endless.*steps="):
        model.predict(slices().repeat().batch(8), verbose=0)


def test_validation_data_may_be_of_every_kind(models: dict[int, CountedModel]) -> None:
    model = counted(models)
    expected = None
    for validation_data in ((X, Y), slices().batch(5), own_slices):
        history = model.fit(X, Y, batch_size=11, validation_data=validation_data, verbose=0).history
        expected = float(np.mean((model.predict(X, verbose=0) - Y) ** 2))
        assert history["val_loss"] == pytest.approx([expected], rel=1e-4)
    assert expected is not None


def test_validation_split_works(models: dict[int, CountedModel]) -> None:
    model = counted(models)
    model.fit(X, Y, batch_size=4, validation_split=0.5, verbose=0)
    np.testing.assert_array_equal(model.visits, np.repeat([1.0, 0.0], EXAMPLES // 2))


def test_sample_weights_and_class_weights_are_applied(models: dict[int, CountedModel]) -> None:
    classes = np.arange(EXAMPLES) % 2
    model = counted(models)
    for weights in (
        {"sample_weight": 1.0 * classes},
        {"class_weight": {0: 0.0, 1: 1.0}},
        {"x": tf.data.Dataset.from_tensor_slices((X, classes, 1.0 * classes)).batch(8), "y": None},
    ):
        before = model.predict(X, verbose=0)[:, 0]
        given = {"x": X, "y": classes, **weights}
        # All in one step, so that the loss is of the weights before it.
        history = model.fit(
            **given, batch_size=None if given["y"] is None else EXAMPLES, steps_per_epoch=1, shuffle=False, verbose=0
        )
        used = slice(8) if given["y"] is None else slice(EXAMPLES)
        expected = np.mean((before[used] - classes[used]) ** 2 * classes[used])
        assert history.history["loss"] == pytest.approx([expected], rel=1e-4)


@pytest.mark.parametrize(
    "data",
    [
        lambda: {"x": nothing},
        pytest.param(lambda: {"x": nothing, "steps_per_epoch": 2}, marks=pytest.mark.long),
        lambda: {"x": nothing(None), "shuffle": False},
        pytest.param(lambda: {"x": X[:0], "y": Y[:0]}, marks=pytest.mark.long),
    ],
    ids=["dataset function", "dataset function, counted", "dataset", "arrays"],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_without_a_step_is_an_error(
    models: dict[int, CountedModel], data: Callable[[], dict[str, Any]]
) -> None:
    model = counted(models)
    with pytest.raises(ValueError, match="no batch for this epoch"):
        model.fit(**data(), verbose=0)
    model.fit(slices().batch(4), shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.visits, np.ones(EXAMPLES))


def test_a_dataset_cached_in_a_file_can_be_read_again_after_a_fit_that_ended_early(models, tmp_path):
    gc.collect()
    gc.disable()
    try:
        data, model = slices().cache(str(tmp_path / "file")).batch(4), counted(models)
        model.fit(data, steps_per_epoch=2, verbose=0, shuffle=False)
        model.fit(data, verbose=0, shuffle=False)
    finally:
        gc.enable()
    assert model.visits.numpy().tolist() == [2.0] * 8 + [1.0] * 16


@pytest.mark.cluster
def test_fit_evaluate_and_predict_wait_for_the_next_worker_while_there_is_none(run_program: ProgramRunner) -> None:
    run_program("""
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster
    from tests.deadline import wait_until

    x = np.ones([40, 2], "float32")
    y = x.sum(1)


    def finite(context):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(10)


    with LocalCluster(workers=1, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        calls = [
            lambda: model.fit(x, y, validation_data=(x, y), verbose=0).history["val_loss"][0],
            lambda: model.fit(finite, verbose=0).history["loss"][0],
            lambda: model.evaluate(x, y, verbose=0),
            lambda: strategy.evaluate(model, finite)["loss"],
            lambda: model.predict(x, verbose=0).mean(),
        ]

        def add(address):
            wait_until(lambda: strategy.cluster.statistics().waiting)
            strategy.cluster.add_worker(address)

        address = cluster.start_worker()
        for call in calls:
            (worker,) = strategy.cluster.workers
            strategy.cluster.remove_worker(worker.index)
            adding = threading.Thread(target=add, args=(address,))
            adding.start()
            assert np.isfinite(call())
            adding.join()
    """)
