"""Tests that shards of every kind of data and model add up to what one evaluation gives, without servers."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import arrays
from coordinator.future import Future
from coordinator.options import Options
from coordinator.ps_strategy.keras.exact_evaluation import (
    ClientShards,
    EvaluationFeed,
    RangeShards,
    Shards,
    shard_count,
)
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions

RNG = np.random.default_rng(5)
X = RNG.normal(size=(53, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("float32")[:, None]
W = RNG.uniform(0.5, 2, 53).astype("float32")


class LocalStrategy:
    """Runs what is scheduled at once, in this process. `calls` lists the batches of each call."""

    def __init__(self, workers: int = 2) -> None:
        self.cluster = SimpleNamespace(workers=[SimpleNamespace(index=index) for index in range(workers)])
        self.extended = SimpleNamespace(services=SimpleNamespace(options=Options()))
        self.calls: list[int] = []

    def schedule(self, function: Any, args: Any, worker: int | None = None) -> Future:
        future = Future(None, 0, lambda: False)
        result = tf.nest.map_structure(lambda value: value.numpy(), function(*args))
        self.calls.append(int(result["batches"]))
        future.set_result(result)
        return future

    def evaluate(self, shards: Shards, functions: Any) -> Any:
        """Returns what the shards add up to."""
        return EvaluationFeed(shards, self).evaluate(functions)


class Largest(keras.metrics.Metric):
    """The largest output: its state is no sum."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(name="largest")
        self.start = start
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(start))

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs)))

    def result(self) -> Any:
        return self.value

    def reset_state(self) -> None:
        self.value.assign(self.start)


class MergedLargest(Largest):
    def merge(self, state: Any, other: Any) -> Any:
        return [np.maximum(*each) for each in zip(state, other, strict=True)]


def classifier(*metrics: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid", activity_regularizer="l2")])
    model.compile(loss="mse", weighted_metrics=list(metrics))
    return model


def two_outputs() -> keras.Model:
    inputs = {"a": keras.Input((4,), name="a")}
    outputs = {"b": keras.layers.Dense(1, name="b")(inputs["a"]), "c": keras.layers.Dense(2, name="c")(inputs["a"])}
    model = keras.Model(inputs, outputs)
    model.compile(loss={"b": "mse", "c": "mae"}, metrics={"b": ["mae"], "c": [keras.metrics.R2Score(name="r2")]})
    return model


class OwnStep(keras.Model):
    """Logs the result of a metric, what is computed from that, and what is no metric's result."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")
        self.compile()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        x, y = data
        error = tf.reduce_mean((self.dense(x) - y) ** 2)
        self.error.update_state(error)
        mean = self.error.result()
        return {"last": error, "error": mean, "root": tf.sqrt(mean), "sum": tf.convert_to_tensor(self.error.total)}


def functions_of(model: keras.Model) -> ShardFunctions:
    return ShardFunctions(model.test_step, lambda: model.metrics, model.get_metrics_result)


def sharded(model: keras.Model, data: Any, functions: Any = None, workers: int = 2) -> Any:
    batches = tf.data.Dataset.from_tensor_slices(data).batch(10)
    shards = ClientShards(iter(batches), int(batches.cardinality()), 3)
    return LocalStrategy(workers).evaluate(shards, functions or functions_of(model))


def assert_close(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(np.squeeze(value), other[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: classifier("mae", keras.metrics.F1Score()), (X, Y, W)),
        (two_outputs, ({"a": X}, {"b": Y, "c": X[:, :2]})),
        (OwnStep, (X, Y)),
    ],
    ids=["weights", "two outputs", "own step"],
)
def test_shards_add_up_to_one_evaluation_and_change_no_variable(make: Any, data: Any) -> None:
    model = make()
    found = sharded(model, data)
    assert not any(np.any(tf.convert_to_tensor(each)) for metric in model.metrics for each in metric.variables)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(10)
    # One trace for all batches: `evaluate` of Keras 3.16 traces the first one with its size, and then gives its loss of
    # each output another weight than the losses of later batches.
    step = tf.function(model.test_step, input_signature=[batches.element_spec])
    for batch in batches:
        expected = step(batch)
    assert_close(expected, found)


def test_ranges_of_a_source_give_the_same_as_batches_of_the_client() -> None:
    model, strategy = classifier("mae"), LocalStrategy()
    functions, expected = functions_of(model), sharded(model, (X, Y))
    assert_close(strategy.evaluate(RangeShards(arrays(X, Y), 10, 4), functions), expected)
    assert strategy.calls == [2, 2, 2, 2]
    # The trial is made once.
    assert_close(strategy.evaluate(RangeShards(arrays(X, Y), 10, 1), functions), expected)
    assert strategy.calls[4:] == [6]
    # They are scheduled while there is no worker, too.
    assert shard_count(None, LocalStrategy(workers=0)) == 4
    assert_close(sharded(model, (X, Y), functions, workers=0), expected)


def test_batches_that_cannot_be_joined_are_sent_one_by_one() -> None:
    lengths = RNG.integers(1, 4, 20)
    ragged = tf.RaggedTensor.from_row_lengths(RNG.normal(size=lengths.sum()).astype("float32"), lengths)
    mean = keras.metrics.Mean()
    functions = ShardFunctions(
        lambda batch: mean.update_state(batch.flat_values), lambda: [mean], lambda: {"mean": mean.result()}
    )
    strategy = LocalStrategy()
    batches = tf.data.Dataset.from_tensor_slices(ragged).batch(8)
    found = strategy.evaluate(ClientShards(iter(batches), 3, 1), functions)
    assert found["mean"] == pytest.approx(ragged.flat_values.numpy().mean(), rel=1e-6)
    assert strategy.calls == [2, 1, 1, 1]


def test_a_metric_that_is_no_sum_is_named_and_may_merge_states() -> None:
    for start in (0.0, -np.inf):
        with pytest.raises(ValueError, match=r"the metric 'largest' is no sum over batches.*merge"):
            sharded(classifier(Largest(start)), (X, Y))
    model = classifier(MergedLargest(-np.inf))
    assert sharded(model, (X, Y))["largest"] == pytest.approx(model.predict(X, verbose=0).max())
    # If two batches say nothing, it is checked again.
    model = classifier(Largest())
    functions = functions_of(model)
    model.set_weights([np.zeros([4, 1]), np.array([-1e3])])
    sharded(model, (X, Y), functions)
    model.set_weights([np.zeros([4, 1]), np.array([0.5])])
    with pytest.raises(ValueError, match="'largest'"):
        sharded(model, (X, Y), functions)


def test_empty_data_and_steps_that_change_other_variables_are_refused() -> None:
    class Counted(OwnStep):
        def __init__(self, count: Any) -> None:
            super().__init__()
            self.count = count

        def test_step(self, data: Any) -> Any:
            self.count.assign_add(1.0)
            return super().test_step(data)

    for count, words in ((tf.Variable(0.0), "AssignAddVariableOp"), (keras.Variable(0.0, name="seen"), "'seen'")):
        with pytest.raises(ValueError, match=words):
            sharded(Counted(count), (X, Y))
    with pytest.raises(ValueError, match="empty"):
        sharded(classifier(), (X[:0], Y[:0]))
