"""Tests that shards of every kind of data and model add up to what one evaluation gives, without servers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import arrays
from coordinator.ps_strategy.keras.exact_evaluation import ClientShards, RangeShards, shard_count
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions
from tests.ps_strategy.keras.evaluation.local_strategy import LocalStrategy

RNG = np.random.default_rng(5)
X = RNG.normal(size=(53, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("float32")[:, None]
W = RNG.uniform(0.5, 2, 53).astype("float32")


class Largest(keras.metrics.Metric):
    """The largest output: its state is no sum."""

    def __init__(self, start: float = 0.0, name: str = "largest") -> None:
        super().__init__(name=name)
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
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(loss="mse", weighted_metrics=list(metrics))
    return model


def two_outputs() -> keras.Model:
    inputs = {"a": keras.Input((4,), name="a")}
    outputs = {"b": keras.layers.Dense(1, name="b")(inputs["a"]), "c": keras.layers.Dense(2, name="c")(inputs["a"])}
    model = keras.Model(inputs, outputs)
    model.compile(loss={"b": "mse", "c": "mae"}, metrics={"b": ["mae"], "c": [keras.metrics.R2Score(name="r2")]})
    return model


class Masked(keras.Model):
    """Has a mask, a loss of its own beside the compiled one, and variables that its first batch creates."""

    def __init__(self) -> None:
        super().__init__()
        self.masking = keras.layers.Masking()
        self.recurrent = keras.layers.SimpleRNN(3, return_sequences=True)
        self.dense = keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, x: Any) -> Any:
        hidden = self.recurrent(self.masking(x))
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        return self.dense(hidden)


class OwnStep(keras.Model):
    """Logs what is no metric's result."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")

    def test_step(self, data: Any) -> Any:
        x, y = data
        error = tf.reduce_mean((self.dense(x) - y) ** 2)
        self.error.update_state(error)
        return {"last_error": error}


def sharded(model: keras.Model, data: Any, size: int = 10, shards: int = 3, functions: Any = None) -> Any:
    functions = functions or ShardFunctions(model.test_step, lambda: model.metrics, model.get_metrics_result)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(size)
    return LocalStrategy().evaluate(ClientShards(iter(batches), int(batches.cardinality()), shards), functions)


def assert_close(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=2e-6, err_msg=name)


def test_shards_are_scheduled_while_there_is_no_worker() -> None:
    strategy = LocalStrategy()
    strategy.cluster.workers = ()
    assert shard_count(None, strategy) == 4
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    model = classifier("mae")
    functions = ShardFunctions(model.test_step, lambda: model.metrics, model.get_metrics_result)
    found = strategy.evaluate(ClientShards(iter(batches), int(batches.cardinality()), 4), functions)
    assert_close(found, sharded(model, (X, Y)))


LENGTHS = RNG.integers(1, 6, (53, 1))
SEQUENCES = (RNG.normal(size=(53, 5, 2)) * (np.arange(5) < LENGTHS)[..., None]).astype("float32")


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: classifier("mae", keras.metrics.F1Score()), (X, Y, W)),
        (two_outputs, ({"a": X}, {"b": Y, "c": X[:, :2]})),
        pytest.param(Masked, (SEQUENCES, SEQUENCES[..., :1]), marks=pytest.mark.long),
        (OwnStep, (X, Y)),
    ],
    ids=["weights", "two outputs", "masks", "own step"],
)
def test_shards_add_up_to_one_evaluation(make: Any, data: Any) -> None:
    model = make()
    if isinstance(model, OwnStep):
        model.compile()
    elif not model.compiled:
        model.compile(loss="mse", weighted_metrics=["mae"])
    found = sharded(model, data)
    model.reset_metrics()
    batches = tf.data.Dataset.from_tensor_slices(data).batch(10)
    # One trace for all batches: `evaluate` of Keras 3.16 traces the first one with its size, and then gives its loss of
    # each output another weight than the losses of later batches.
    step = tf.function(model.test_step, input_signature=[batches.element_spec])
    for batch in batches:
        expected = step(batch)
    assert_close({name: float(np.squeeze(value)) for name, value in expected.items()}, found)


def test_no_variable_changes() -> None:
    model = classifier("mae")
    model.evaluate(X, Y, verbose=0)
    before = [tf.convert_to_tensor(each) for each in model.variables]
    sharded(model, (X, Y))
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, tf.convert_to_tensor(other))


def test_ranges_of_a_source_give_the_same_as_batches_of_the_client() -> None:
    model = classifier("mae")
    functions = ShardFunctions(model.test_step, lambda: model.metrics, model.get_metrics_result)
    strategy = LocalStrategy()
    found = strategy.evaluate(RangeShards(arrays(X, Y), 10, 4), functions)
    assert strategy.calls == [2, 2, 2, 2]
    assert_close(found, sharded(model, (X, Y)))
    # The trial is made once.
    assert_close(found, strategy.evaluate(RangeShards(arrays(X, Y), 10, 1), functions))
    assert strategy.calls[4:] == [6]


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


@pytest.mark.parametrize("start", [0.0, -np.inf])
def test_a_metric_that_is_no_sum_is_named(start: float) -> None:
    with pytest.raises(ValueError, match=r"the metric 'largest' is no sum over batches.*merge"):
        sharded(classifier(Largest(start)), (X, Y))


def test_a_metric_that_is_no_sum_may_merge_states() -> None:
    model = classifier(MergedLargest(-np.inf))
    assert sharded(model, (X, Y))["largest"] == pytest.approx(model.predict(X, verbose=0).max())


def test_a_metric_of_which_two_batches_say_nothing_is_checked_again() -> None:
    model = classifier(Largest())
    functions = ShardFunctions(model.test_step, lambda: model.metrics, model.get_metrics_result)
    for weight, value in zip(model.weights, (0.0, -1e3), strict=True):
        weight.assign(weight * 0 + value)
    sharded(model, (X, Y), functions=functions)
    assert not functions.are_sums
    model.weights[-1].assign([0.5])
    with pytest.raises(ValueError, match="'largest'"):
        sharded(model, (X, Y), functions=functions)


@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_a_step_that_changes_other_variables_is_refused(kind: str) -> None:
    class Counted(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.count = tf.Variable(0.0) if kind == "tensorflow" else keras.Variable(0.0, name="seen")

        def test_step(self, data: Any) -> Any:
            self.count.assign_add(1.0)
            return super().test_step(data)

    with pytest.raises(ValueError, match="'seen'" if kind == "keras" else "AssignAddVariableOp"):
        sharded(Counted(), (X, Y))


class OwnLogs(OwnStep):
    """Logs the result of a metric, what is computed from that, and what is no metric's result."""

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        logs = super().test_step(data)
        return {
            **logs,
            "error": self.error.result(),
            "root": tf.sqrt(self.error.result()),
            "sum": tf.convert_to_tensor(self.error.total),
        }


def test_logs_that_are_computed_from_metrics_are_of_all_shards() -> None:
    model, one_process = OwnLogs(), OwnLogs()
    for each in (model, one_process):
        each.compile()
        each(X[:1])
    one_process.set_weights(model.get_weights())
    found = sharded(model, (X, Y))
    expected = one_process.evaluate(X, Y, batch_size=10, verbose=0, return_dict=True)
    assert_close(found, {**expected, "sum": one_process.error.total.numpy()})
    assert found["last_error"] != found["error"]


def test_empty_data_are_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        sharded(classifier(), (X[:0], Y[:0]))
