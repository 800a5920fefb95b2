"""Tests that no concurrent addition to a variable is lost, also where a program reads, adds and assigns."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator

STEPS = 90


def run(strategy: coordinator.ParameterServerStrategy, step: Any, times: int = STEPS) -> None:
    for _ in range(times):
        strategy.schedule(step)
    strategy.join()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda total: total.assign(total + 1.0), STEPS),
        (lambda total: total.assign(total - 1.0), -STEPS),
        pytest.param(
            lambda total: total.assign(tf.constant([1.0, 2.0]) + total), [STEPS, 2 * STEPS], marks=pytest.mark.long
        ),
    ],
)
def test_assigning_a_read_value_plus_a_change_loses_no_update(
    strategy: coordinator.ParameterServerStrategy, change: Callable[[tf.Variable], Any], expected: float
) -> None:
    with strategy.scope():
        total = tf.Variable([0.0, 0.0])

    @tf.function
    def step() -> None:
        change(total)

    run(strategy, step)
    np.testing.assert_array_equal(total.numpy(), np.broadcast_to(expected, [2]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: [v.assign(v + 1.0), v.assign(v + 2.0)], 13.0),
        (lambda v: v.assign(v * 3.0 + 1.0), 31.0),
        (lambda v: v.assign(v + v), 20.0),
        (lambda v: v.assign(1.0 - v), -9.0),
        (lambda v: [before := v + 1.0, v.assign(5.0), v.assign(before)], 11.0),
        (lambda v: [v.assign(5.0), v.assign(v + 1.0)], 6.0),
        (lambda v: tf.cond(v > 0.0, lambda: v.assign(v + 1.0), lambda: v.assign(v - 1.0)), 11.0),
        (lambda v: v.assign(tf.identity(v) + 1.0), 11.0),
    ],
)
def test_a_single_function_computes_what_is_written(
    strategy: coordinator.ParameterServerStrategy, change: Callable[[tf.Variable], Any], expected: float
) -> None:
    with strategy.scope():
        variable = tf.Variable(10.0)

    @tf.function
    def step() -> tf.Tensor:
        change(variable)
        return variable.read_value()

    assert strategy.schedule(step).result() == expected
    assert float(variable) == expected


def test_assignments_on_the_client_work_and_a_wrong_shape_is_refused(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert float(variable.assign(variable + 1.0)) == 2.0
    step = tf.function(lambda: variable.assign(variable + tf.ones([2])))
    for assign in (step.python_function, lambda: strategy.schedule(step)):
        with pytest.raises(ValueError, match="Shape mismatch"):
            assign()


@pytest.mark.long
def test_keras_optimizers_and_metrics_count_every_step(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        auc, overlap = keras.metrics.AUC(num_thresholds=5), keras.metrics.MeanIoU(2)
        # These create their variables when they are first used, while the step is traced.
        score, determination = keras.metrics.F1Score(), keras.metrics.R2Score()

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones([4, 8])) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        mean.update_state(tf.range(4.0))
        accuracy.update_state([0, 1, 2, 0], tf.eye(4, 3))
        auc.update_state([0, 1, 1, 0], [0.1, 0.9, 0.3, 0.6])
        overlap.update_state([0, 1, 1, 0], [0, 1, 0, 0])
        score.update_state(tf.eye(4, 3), tf.eye(4, 3))
        determination.update_state(tf.range(4.0)[:, None], tf.ones([4, 1]))

    run(strategy, step)
    assert int(optimizer.iterations) == STEPS
    assert (float(mean.total), float(mean.count)) == (6.0 * STEPS, 4.0 * STEPS)
    assert (float(accuracy.total), float(accuracy.count)) == (4.0 * STEPS, 4.0 * STEPS)
    assert auc.true_positives.numpy()[0] == 2 * STEPS
    assert overlap.total_cm.numpy().sum() == 4 * STEPS
    assert score.true_positives.numpy().max() == STEPS
    assert float(determination.num_samples) == 4 * STEPS
    assert determination.sum.numpy().sum() == 6 * STEPS


def test_a_custom_layer_counts_every_call(strategy: coordinator.ParameterServerStrategy) -> None:
    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int64")

        def call(self, x: Any) -> Any:
            self.calls.assign_add(2)
            self.calls.assign_sub(1)
            return x

    with strategy.scope():
        layer = Counting()
        layer.build([1])

    @tf.function
    def step() -> tf.Tensor:
        return layer(tf.ones([1]))

    run(strategy, step)
    assert int(layer.calls) == STEPS


# So many rows, and additions to all of them, that the updates of workers overlap.
ROWS, WIDTH, IN_A_STEP, RACING_STEPS = 2048, 64, 10, 80


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda table, rows: table.scatter_add(rows), 1, id="scatter_add"),
        pytest.param(
            lambda table, rows: table.assign_add(rows.values).scatter_sub(rows).scatter_add(rows),
            1,
            id="in sequence",
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda table, rows: tf.tuple([table.scatter_add(rows).read_value(), table.assign_add(rows.values)]),
            2,
            id="beside assign_add",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_addition_to_rows_is_lost(
    strategy: coordinator.ParameterServerStrategy, change: Callable[[tf.Variable, tf.IndexedSlices], Any], expected: int
) -> None:
    with strategy.scope():
        table = tf.Variable(tf.zeros([ROWS, WIDTH]))

    @tf.function
    def step() -> None:
        for _ in tf.range(IN_A_STEP):
            change(table, tf.IndexedSlices(tf.ones([ROWS, WIDTH]), tf.range(ROWS)))

    run(strategy, step, RACING_STEPS)
    np.testing.assert_array_equal(table, np.full([ROWS, WIDTH], expected * RACING_STEPS * IN_A_STEP))


def test_no_product_of_rows_is_lost(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        table = tf.Variable(tf.ones([ROWS, WIDTH]))

    @tf.function
    def step() -> None:
        for _ in tf.range(IN_A_STEP):
            table.scatter_mul(tf.IndexedSlices(2.0 * tf.ones([ROWS, WIDTH]), tf.range(ROWS)))
            table.scatter_div(tf.IndexedSlices(2.0, tf.range(ROWS)))

    run(strategy, step, RACING_STEPS)
    np.testing.assert_array_equal(table, np.ones([ROWS, WIDTH]))
