"""Tests of how a partitioner divides variables that are created in ways that leave it less to know, or by others.

With those of the other files here, they have the meaning of TensorFlow's own: a table in tests/README.md says which.
"""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable
from tests.ps_strategy.sharded.partitioners import partitioned, sharded

TIMEOUT = 120.0
VALUE = np.arange(8, dtype=np.float32)


def divided(variable):
    """Returns the rows of each part."""
    return [part.numpy().tolist() for part in variable.variables]


def test_variables_made_in_a_function_are_divided_too(strategy):
    made = []

    @tf.function
    def make():
        if not made:
            made.append(tf.Variable([[1.0, 0.0], [0.0, 1.0]]))
            made.append(tf.Variable(lambda: tf.eye(2)))
            made.append(tf.Variable(lambda: tf.eye(2), shape=[2, 2], dtype=tf.float32))
        return tf.reduce_sum([tf.gather(each, [1, 0]) for each in made], axis=0)

    with strategy.scope(), partitioned(2):
        rows = make()
    for variable in made:
        assert isinstance(variable, ShardedVariable)
        assert divided(variable) == [[[1, 0]], [[0, 1]]]
        assert len({part.device for part in variable.variables}) == 2
    np.testing.assert_array_equal(rows, 3 * np.eye(2)[::-1])
    np.testing.assert_array_equal(strategy.schedule(make).result(TIMEOUT), rows)


def test_a_variable_is_divided_whose_shape_or_dtype_its_value_tells(strategy):
    for known in ({"shape": [4]}, {"dtype": tf.int64}, {}):
        with strategy.scope(), partitioned(2, rank=1):
            table = tf.Variable(lambda: tf.range(4, dtype=tf.int64), **known)
        assert table.dtype == tf.int64, known
        assert divided(table) == [[0, 1], [2, 3]], known


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_that_aggregates_is_divided_and_changed_by_every_call(strategy, aggregation):
    table = sharded(strategy, np.zeros_like(VALUE), 2, aggregation=tf.VariableAggregation[aggregation])
    assert table.aggregation is tf.VariableAggregation[aggregation]
    assert {type(part) for part in table.variables} == {type(part) for part in sharded(strategy, VALUE).variables}

    @tf.function
    def step(value):
        def update():
            table.assign(value)
            table.scatter_add(tf.IndexedSlices([10.0, 20.0], [7, 0]))
            return table.assign_add(value)

        return strategy.run(update)

    expected = 2 * VALUE + [20, 0, 0, 0, 0, 0, 0, 10]
    np.testing.assert_array_equal(strategy.schedule(step, args=(VALUE,)).result(TIMEOUT), expected)
    assert divided(table) == [expected[:4].tolist(), expected[4:].tolist()]


def test_a_variable_beside_a_part_stays_whole(strategy):
    table = sharded(strategy, VALUE)
    for part in table.variables:
        with strategy.scope(), partitioned(2, rank=1), strategy.extended.colocate_vars_with(part):
            beside = tf.Variable([4, 5])
        assert not isinstance(beside, ShardedVariable)
        assert beside.device == part.device
        np.testing.assert_array_equal(beside, [4, 5])


def test_parts_are_always_the_same_variables_and_belong_to_the_whole_alone(strategy):
    table = sharded(strategy, VALUE)
    assert [id(part) for part in table.variables] == [id(part) for part in table] == [id(part) for part in table.parts]
    # Gradients and training are those of the whole; a part has no name for it, as TensorFlow's `_sharded_container`.
    assert not any(part.trainable or hasattr(part, "_sharded_container") for part in table.variables)
    assert table.trainable
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table**2)
    whole, *parts = tape.gradient(loss, [table, *table.variables])
    np.testing.assert_array_equal(tf.convert_to_tensor(whole), 2 * VALUE)
    assert parts == [None, None]
