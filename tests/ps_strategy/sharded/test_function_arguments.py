"""Tests of sharded variables as arguments of functions, in structures, and as children of modules."""

import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
VALUE = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def tables(sharded):
    """Two variables of one type and shape."""
    return [sharded(VALUE * factor, parts=2) for factor in (1, 10)]


def test_a_function_takes_it_as_an_argument_and_is_traced_once_for_each(strategy, tables):
    traced = []

    @tf.function
    def add_and_read(table, ids):
        traced.append(table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        table.scatter_add(tape.gradient(loss, table))
        return tf.gather(table, ids)

    added = np.array([[2, 2], [1, 1], [2, 2]])
    for times in (1, 2):
        for table, factor in zip(tables, (1, 10), strict=True):
            found = add_and_read(table, tf.constant([5, 0, 5]))
            np.testing.assert_array_equal(found, factor * VALUE[[5, 0, 5]] + times * added)
    assert [id(table) for table in traced] == [id(table) for table in tables]
    for table, factor in zip(tables, (1, 10), strict=True):
        found = strategy.schedule(add_and_read, args=(table, np.array([5, 0, 5]))).result(TIMEOUT)
        np.testing.assert_array_equal(found, factor * VALUE[[5, 0, 5]] + 3 * added)


def test_it_is_one_leaf_of_a_structure_and_one_variable_of_a_module(tables, strategy):
    class Lookups(tf.Module):
        def __init__(self):
            super().__init__()
            self.tables = tables
            self.scale = tf.Variable(2.0)

        @tf.function
        def __call__(self, ids):
            return self.scale * sum(tf.gather(table, ids) for table in self.tables)

    for structure in (tables, {"one": tables[0], "other": (tables[1],)}):
        assert [each is table for each, table in zip(tf.nest.flatten(structure), tables, strict=True)] == [True] * 2
    assert tf.nest.map_structure(lambda table: table.shape, tables) == [(6, 2)] * 2
    assert len({table.ref() for table in [*tables, *tables]}) == 2
    with strategy.scope():
        module = Lookups()
    assert [variable.shape.as_list() for variable in module.trainable_variables] == [[], [6, 2], [6, 2]]
    assert {id(table) for table in tables} <= {id(variable) for variable in module.variables}
    found = strategy.schedule(module.__call__, args=(np.array([5, 1]),)).result(TIMEOUT)
    np.testing.assert_array_equal(found, 22 * VALUE[[5, 1]])
