"""Tests that `predict` returns the same as in one process, in the order of the data."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import arrays, client

X = np.random.default_rng(1).normal(size=(47, 3)).astype("float32")


@pytest.fixture(scope="module")
def models(strategy: coordinator.ParameterServerStrategy) -> tuple[keras.Model, keras.Model]:
    """Two models of the same weights, with and without the strategy. They have two outputs."""

    def make() -> keras.Model:
        inputs = keras.Input((3,))
        outputs = {"sum": keras.layers.Dense(1)(inputs), "wide": keras.layers.Dense(4, "tanh")(inputs)}
        return keras.Model(inputs, outputs)

    with strategy.scope():
        distributed = make()
        distributed.compile(steps_per_execution=2)
    local = make()
    local.set_weights(distributed.get_weights())
    return distributed, local


def assert_close(found: Any, expected: Any) -> None:
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


# row 183: equal inputs give equal predictions
def test_predictions_are_those_of_one_process(models: tuple[keras.Model, keras.Model]) -> None:
    distributed, local = models
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(5)
    for x, arguments, count in (
        (X, {"batch_size": 4}, 47),
        (dataset, {}, 47),
        (dataset, {"steps": 6}, 30),
        (X[:2], {"batch_size": 4}, 2),
        (arrays(X, X[:, 0]), {"batch_size": 10}, 47),
        (client(list(X)), {"batch_size": 10}, 47),
        (client(list(X)), {"batch_size": 10, "steps": 4}, 40),
    ):
        assert_close(distributed.predict(x, verbose=0, **arguments), local.predict(X[:count], verbose=0))


def test_callbacks_get_the_outputs_of_each_batch_and_may_predict(strategy, models) -> None:
    distributed, local = models
    with strategy.scope():
        distributed.compile()
    seen: list[Any] = []
    inner: list[Any] = []

    def record(batch: int, logs: Any) -> None:
        seen.append(np.array(logs["sum"]))
        inner.append(distributed.predict(X, verbose=0, callbacks=[]))

    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = record
    outer = distributed.predict(X, batch_size=20, verbose=0, callbacks=[callback])
    assert [len(outputs) for outputs in seen] == [20, 20, 7]
    expected = local.predict(X, verbose=0)
    assert_close(np.concatenate(seen), expected["sum"])
    for found in (outer, *inner):
        assert_close(found, expected)
