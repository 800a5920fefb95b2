"""Layers with `stateful=True`: each worker continues its own sequences."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator import ParameterServerStrategy
from coordinator.ps_strategy.keras.internals.patches import stateful_layers
from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 60.0
WORKERS = 2
STEPS = 3
LENGTH = 10
LAYERS = [
    (lambda: keras.layers.RNN(keras.layers.LSTMCell(2), stateful=True), [1, 2, 1]),
    (lambda: keras.layers.Bidirectional(keras.layers.SimpleRNN(2, stateful=True)), [1, 2, 1]),
]


def built() -> list[Any]:
    layers = [make() for make, _ in LAYERS]
    for layer, (_, shape) in zip(layers, LAYERS, strict=True):
        layer.build(shape)
        for weight in layer.trainable_weights:
            weight.assign(tf.fill(weight.shape, 0.3))
    return layers


def test_each_worker_continues_its_own_sequences_until_the_client_resets_them(
    strategy: ParameterServerStrategy,
) -> None:
    here = built()
    with strategy.scope():
        layers = built()

    @tf.function
    def step(value: Any) -> Any:
        return [layer(tf.fill(shape, value)) for layer, (_, shape) in zip(layers, LAYERS, strict=True)]

    expected = []
    for worker in range(WORKERS):
        for layer, (_, shape) in zip(here, LAYERS, strict=True):
            expected.append([layer(tf.fill(shape, 0.1 * (worker + 1))).numpy() for _ in range(STEPS)])
            layer.reset_states()
    assert all(not np.allclose(first, second) for first, second, *_ in expected)
    for _ in range(2):
        # Many at once, which may be fused.
        futures = [
            [strategy.schedule(step, (0.1 * (worker + 1),), worker=worker) for worker in range(WORKERS)]
            for _ in range(STEPS)
        ]
        strategy.join(TIMEOUT)
        for worker in range(WORKERS):
            found = [each[worker].result() for each in futures]
            for number in range(len(LAYERS)):
                wanted = expected[worker * len(LAYERS) + number]
                np.testing.assert_allclose([each[number] for each in found], wanted, rtol=1e-4)
        for layer in layers:
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
    assert on_every_worker(strategy, step) == [[[3.0]], [[1.0]]]
    assert "task:1/device:CPU:0 has lost its state of" in caplog.text


def counting_layer() -> keras.layers.SimpleRNN:
    """Returns a layer whose output is the sum of all inputs until then."""
    ones = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
    return keras.layers.SimpleRNN(1, activation="linear", use_bias=False, stateful=True, trainable=False, **ones)


def counting_model() -> keras.Model:
    """Returns a model with a loss of 0 if each batch continues the one before it; the first step builds its layers."""
    # The layer is in a model in a model.
    model = keras.Sequential([keras.Sequential([counting_layer()]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


X, Y = np.ones([LENGTH, 1, 1], "float32"), np.arange(1, LENGTH + 1, dtype="float32")[:, None]


def dataset(_: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(1, drop_remainder=True)


@pytest.mark.long
def test_each_worker_trains_and_evaluates_on_sequences_of_a_dataset_function(
    strategy: ParameterServerStrategy,
) -> None:
    with strategy.scope():
        model = counting_model()
    for steps in (None, WORKERS * LENGTH // 2):
        history = model.fit(dataset, steps_per_epoch=steps, verbose=0).history
        [layer] = stateful_layers(model)
        layer.reset_state()
        assert history["loss"] == [0.0]
    assert model.evaluate(dataset, verbose=0) == 0.0


def test_batches_of_one_sequence_are_not_dealt_to_several_workers(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        model = counting_model()
    source = coordinator.data.arrays(X, Y)
    for use in (
        lambda: model.fit(X, Y, batch_size=1, shuffle=False, verbose=0),
        lambda: model.fit(dataset(), shuffle=False, verbose=0),
        lambda: model.fit(source, batch_size=1, verbose=0),
        lambda: model.evaluate(X, Y, batch_size=1, verbose=0),
        lambda: model.evaluate(source, batch_size=1, verbose=0),
        lambda: model.predict(X, batch_size=1, verbose=0),
        lambda: model.train_on_batch(X[:1], Y[:1]),
        lambda: strategy.evaluate(model, (X, Y)),
    ):
        with pytest.raises(ValueError, match="stateful=True"):
            use()
