"""Layers with `stateful=True`: each worker continues its own sequences."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator import ParameterServerStrategy
from coordinator.ps_strategy.keras.internals.patches import stateful_layers
from tests.program_runner import ProgramRunner
from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 60.0
WORKERS = 3
STEPS = 6
LENGTH = 40


def built(make: Callable[[], Any], shape: list[int]) -> Any:
    layer = make()
    layer.build(shape)
    for weight in layer.trainable_weights:
        weight.assign(tf.fill(weight.shape, 0.3))
    return layer


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: keras.layers.SimpleRNN(2, stateful=True), [1, 2, 1]),
        (lambda: keras.layers.RNN(keras.layers.GRUCell(2), stateful=True), [1, 2, 1]),
        (lambda: keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=True)), [1, 2, 1]),
        (lambda: keras.layers.ConvLSTM1D(2, 1, stateful=True), [1, 2, 3, 1]),
    ],
    ids=["SimpleRNN", "RNN", "Bidirectional", "ConvLSTM1D"],
)
def test_each_worker_continues_its_own_sequences_until_the_client_resets_them(
    strategy: ParameterServerStrategy, make: Callable[[], Any], shape: list[int]
) -> None:
    here = built(make, shape)
    with strategy.scope():
        layer = built(make, shape)

    @tf.function
    def step(x: Any) -> Any:
        return layer(x)

    inputs = [tf.fill(shape, 0.1 * (worker + 1)) for worker in range(WORKERS)]
    expected = []
    for x in inputs:
        expected.append([here(x).numpy() for _ in range(STEPS)])
        here.reset_states()
    assert not np.allclose(expected[0][0], expected[0][1])
    for _ in range(2):
        # Many at once, which may be fused.
        futures = [
            [strategy.schedule(step, (x,), worker=number) for number, x in enumerate(inputs)] for _ in range(STEPS)
        ]
        strategy.join(TIMEOUT)
        for number in range(WORKERS):
            found = [each[number].result() for each in futures]
            np.testing.assert_allclose(found, expected[number], rtol=1e-4)
        layer.reset_states()


def test_a_restarted_worker_begins_its_sequences_again_and_the_log_says_so(
    strategy: ParameterServerStrategy, shared_cluster: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        layer = counting_layer()
        layer.build([1, 1, 1])
    step = tf.function(lambda: layer(tf.ones([1, 1, 1])))
    for number in (1.0, 2.0):
        assert on_every_worker(strategy, step) == [[[number]]] * WORKERS
    # The client's state is in a checkpoint.
    checkpoint = tf.train.Checkpoint(layer=layer)
    checkpoint.restore(checkpoint.save(str(tmp_path / "checkpoint"))).assert_consumed()
    assert layer.states[0].numpy() == 0.0
    shared_cluster.restart("worker", 1)
    assert on_every_worker(strategy, step) == [[[3.0]], [[1.0]], [[3.0]]]
    assert "task:1/device:CPU:0 has lost its state of" in caplog.text


def counting_layer() -> keras.layers.SimpleRNN:
    """Returns a layer whose output is the sum of all inputs until then."""
    ones = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
    return keras.layers.SimpleRNN(1, activation="linear", use_bias=False, stateful=True, trainable=False, **ones)


def counting_model() -> keras.Model:
    """Returns a model with a loss of 0 if each batch continues the one before it."""
    inputs = keras.Input((1, 1), batch_size=1)
    # The layer is in a model in a model.
    inner = keras.Sequential([keras.Input((1, 1), batch_size=1), counting_layer()])
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inner(inputs)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


class CountingModel(keras.Model):
    """The same as a class whose layers are built while the first step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = counting_layer()
        self.scale = keras.layers.Dense(1, kernel_initializer="ones")
        self.compile(keras.optimizers.SGD(0.0), "mse")

    def call(self, x: Any) -> Any:
        return self.scale(self.inner(x))


X, Y = np.ones([LENGTH, 1, 1], "float32"), np.arange(1, LENGTH + 1, dtype="float32")[:, None]


def dataset(_: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(1, drop_remainder=True)


@pytest.fixture
def model(strategy: ParameterServerStrategy) -> Iterator[keras.Model]:
    with strategy.scope():
        yield counting_model()


@pytest.mark.parametrize("make", [counting_model, CountingModel], ids=["built before", "built while traced"])
def test_each_worker_trains_and_evaluates_on_sequences_of_a_dataset_function(
    strategy: ParameterServerStrategy, make: Callable[[], keras.Model]
) -> None:
    with strategy.scope():
        model = make()
    [layer] = stateful_layers(model)
    for steps in (None, WORKERS * LENGTH // 2):
        history = model.fit(dataset, steps_per_epoch=steps, verbose=0).history
        layer.reset_state()
        assert history["loss"] == [0.0]
    assert model.evaluate(dataset, verbose=0) == 0.0


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.fit(X, Y, batch_size=1, shuffle=False, verbose=0),
        lambda model: model.fit(dataset(), shuffle=False, verbose=0),
        lambda model: model.fit(coordinator.data.arrays(X, Y), batch_size=1, verbose=0),
        lambda model: model.evaluate(X, Y, batch_size=1, verbose=0),
        lambda model: model.evaluate(coordinator.data.arrays(X, Y), batch_size=1, verbose=0),
        lambda model: model.predict(X, batch_size=1, verbose=0),
        lambda model: model.train_on_batch(X[:1], Y[:1]),
        lambda model: model.distribute_strategy.evaluate(model, (X, Y)),
    ],
    ids=["fit", "dataset", "source", "evaluate", "evaluated source", "predict", "single batch", "shards"],
)
def test_batches_of_one_sequence_are_not_dealt_to_several_workers(model: keras.Model, use: Any) -> None:
    with pytest.raises(ValueError, match="stateful=True"):
        use(model)


@pytest.mark.cluster
def test_with_one_worker_fit_evaluate_and_predict_keep_the_order_of_batches(run_program: ProgramRunner) -> None:
    run_program("""
    import numpy as np

    import coordinator
    from coordinator.testing import LocalCluster
    from tests.ps_strategy.keras.test_sequence_states import X, Y, counting_model, dataset, stateful_layers

    with LocalCluster(workers=1, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = counting_model()
        [layer] = stateful_layers(model)
        uses = [
            lambda: model.fit(X, Y, batch_size=1, shuffle=False, verbose=0).history["loss"][0],
            lambda: model.fit(dataset(), shuffle=False, verbose=0).history["loss"][0],
            lambda: model.evaluate(X, Y, batch_size=1, verbose=0),
            lambda: np.abs(model.predict(X, batch_size=1, verbose=0) - Y).max(),
        ]
        for number, use in enumerate(uses):
            assert use() == 0.0, number
            layer.reset_state()
    """)
