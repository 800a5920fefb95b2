"""Tests that `predict` returns the same as in one process, in the order of the data."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import arrays, client

X = np.random.default_rng(1).normal(size=(47, 3)).astype("float32")


@pytest.fixture
def models(strategy: coordinator.ParameterServerStrategy) -> tuple[keras.Model, keras.Model]:
    """Two models of the same weights, with and without the strategy. They have two outputs."""

    def make() -> keras.Model:
        inputs = keras.Input((3,))
        return keras.Model(
            inputs, {"sum": keras.layers.Dense(1)(inputs), "wide": keras.layers.Dense(4, "tanh")(inputs)}
        )

    with strategy.scope():
        distributed = make()
    local = make()
    local.set_weights(distributed.get_weights())
    return distributed, local


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.long), 3])
# row 183: equal inputs give equal predictions
def test_predictions_are_those_of_one_process(
    models: tuple[keras.Model, keras.Model], strategy: coordinator.ParameterServerStrategy, steps_per_execution: int
) -> None:
    distributed, local = models
    with strategy.scope():
        distributed.compile(steps_per_execution=steps_per_execution)
    for x, arguments in (
        (X, {"batch_size": 4}),
        (tf.data.Dataset.from_tensor_slices(X).batch(5), {}),
        (tf.data.Dataset.from_tensor_slices(X).batch(5), {"steps": 6}),
        (X[:2], {"batch_size": 4}),
    ):
        expected: Any = local.predict(x, verbose=0, **arguments)
        predicted = distributed.predict(x, verbose=0, **arguments)
        assert set(predicted) == {"sum", "wide"}
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), predicted, expected)


def test_predictions_of_a_source_are_in_its_order(
    models: tuple[keras.Model, keras.Model], strategy: coordinator.ParameterServerStrategy
) -> None:
    distributed, local = models
    with strategy.scope():
        distributed.compile(steps_per_execution=2)
    on_client = client(list(X))
    for source, steps, count in ((arrays(X, X[:, 0]), None, 47), (on_client, None, 47), (on_client, 4, 40)):
        predicted = distributed.predict(source, batch_size=10, steps=steps, verbose=0)
        expected = local.predict(X[:count], verbose=0)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), predicted, expected)


def test_callbacks_get_the_outputs_of_each_batch(models: tuple[keras.Model, keras.Model]) -> None:
    distributed, local = models
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = lambda batch, logs: seen.append(np.array(logs["sum"]))
    distributed.predict(X, batch_size=10, verbose=0, callbacks=[callback])
    assert [len(outputs) for outputs in seen] == [10, 10, 10, 10, 7]
    np.testing.assert_allclose(np.concatenate(seen), local.predict(X, verbose=0)["sum"], rtol=1e-5, atol=1e-6)


def test_a_prediction_may_be_made_during_another_one(models: tuple[keras.Model, keras.Model]) -> None:
    distributed, local = models
    inner: list[Any] = []
    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = lambda batch, logs: inner.append(distributed.predict(X, verbose=0)["sum"])
    outer = distributed.predict(X, batch_size=20, verbose=0, callbacks=[callback])["sum"]
    expected = local.predict(X, verbose=0)["sum"]
    assert len(inner) == 3
    for predicted in (outer, *inner):
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
