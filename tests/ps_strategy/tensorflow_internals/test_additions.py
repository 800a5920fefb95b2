"""Tests that no concurrent addition to a variable is lost, also where a program reads, adds and assigns."""

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


def test_assigning_a_read_value_plus_a_change_loses_no_update(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        added, subtracted, added_to = (tf.Variable([0.0, 0.0]) for _ in range(3))

    @tf.function
    def step() -> None:
        added.assign(added + 1.0)
        subtracted.assign(subtracted - 1.0)
        added_to.assign(tf.constant([1.0, 2.0]) + added_to)

    run(strategy, step)
    assert [each.numpy().tolist() for each in (added, subtracted, added_to)] == [
        [STEPS, STEPS],
        [-STEPS, -STEPS],
        [STEPS, 2 * STEPS],
    ]


def test_a_single_function_computes_what_is_written(strategy: coordinator.ParameterServerStrategy) -> None:
    changes: dict[float, list[Any]] = {
        13.0: [lambda v: [v.assign(v + 1.0), v.assign(v + 2.0)]],
        31.0: [lambda v: v.assign(v * 3.0 + 1.0)],
        20.0: [lambda v: v.assign(v + v)],
        -9.0: [lambda v: v.assign(1.0 - v)],
        6.0: [lambda v: [v.assign(5.0), v.assign(v + 1.0)]],
        11.0: [
            lambda v: [before := v + 1.0, v.assign(5.0), v.assign(before)],
            lambda v: tf.cond(v > 0.0, lambda: v.assign(v + 1.0), lambda: v.assign(v - 1.0)),
            lambda v: v.assign(tf.identity(v) + 1.0),
        ],
    }
    cases = [(expected, change) for expected, each in changes.items() for change in each]
    with strategy.scope():
        variables = [tf.Variable(10.0) for _ in cases]

    @tf.function
    def step() -> list[tf.Tensor]:
        for (_, change), variable in zip(cases, variables, strict=True):
            change(variable)
        return [variable.read_value() for variable in variables]

    assert strategy.schedule(step).result() == [expected for expected, _ in cases]


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
    run(strategy, tf.function(lambda: layer(tf.ones([1]))))
    assert int(layer.calls) == STEPS


def test_no_addition_to_rows_is_lost(strategy: coordinator.ParameterServerStrategy) -> None:
    # So many rows, and changes of all of them, that the updates of workers overlap.
    rows, width, in_a_step, steps = 2048, 64, 10, 80
    with strategy.scope():
        table, factors = tf.Variable(tf.zeros([rows, width])), tf.Variable(tf.ones([rows, width]))

    @tf.function
    def step() -> None:
        for _ in tf.range(in_a_step):
            table.scatter_add(tf.IndexedSlices(tf.ones([rows, width]), tf.range(rows)))
            factors.scatter_mul(tf.IndexedSlices(2.0 * tf.ones([rows, width]), tf.range(rows)))
            factors.scatter_div(tf.IndexedSlices(2.0, tf.range(rows)))

    run(strategy, step, steps)
    np.testing.assert_array_equal(table, np.full([rows, width], steps * in_a_step))
    np.testing.assert_array_equal(factors, np.ones([rows, width]))
