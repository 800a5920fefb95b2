"""Tests that a sharded variable does what the same variable in one piece does, and sends only the rows asked for."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.sharded.partitioners import sharded

TIMEOUT = 120.0
VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)
# In no order, and with repeats.
IDS = [7, 1, 9, 0, 7]
DELTA = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
ROWS = [9, 0, 4, 3]


@pytest.fixture(scope="module")
def table(strategy):
    """A variable in 3 parts, 4 + 3 + 3 rows."""
    return sharded(strategy, VALUE, 3, name="table")


@pytest.fixture(autouse=True)
def renewed(table):
    table.assign(VALUE)


def operations(graph):
    return sorted(each.type for each in graph.get_operations())


def test_it_is_a_variable_of_the_whole_shape_with_parts_on_the_servers(table):
    assert isinstance(table, tf.Variable)
    assert table.trainable
    assert (table.name, table.shape, table.dtype) == ("table:0", (10, 2), tf.float32)
    assert [part.name for part in table.variables] == [f"table/part_{number}:0" for number in range(3)]
    assert [part.shape[0] for part in table] == [4, 3, 3]
    assert len(table) == 10
    first, second, third = (tf.DeviceSpec.from_string(part.device) for part in table.parts)
    assert first.job == "ps"
    assert first == third != second
    assert bool(table.is_initialized())
    np.testing.assert_array_equal(table.numpy(), VALUE)
    np.testing.assert_array_equal(table + 1, VALUE + 1)


LOOKUPS = {
    "gather": tf.gather,
    "sparse_read": lambda table, ids: table.sparse_read(ids),
    "embedding_lookup": tf.nn.embedding_lookup,
    "named": lambda table, ids: tf.nn.embedding_lookup(table, ids, name="rows"),
    "version 1": tf.compat.v1.nn.embedding_lookup,
    "gather_nd": lambda table, ids: tf.gather_nd(table, tf.expand_dims(ids, -1)),
}


@pytest.mark.long
def test_lookups_return_rows_in_order_and_read_these_rows_alone(table):
    @tf.function
    def lookups(ids):
        return [lookup(table, ids) for lookup in LOOKUPS.values()]

    traced = lookups.get_concrete_function(tf.TensorSpec([None], tf.int64))
    found = operations(traced.graph)
    assert "ReadVariableOp" not in found
    assert found.count("ResourceGather") == 3 * len(LOOKUPS)
    for name, rows in zip(LOOKUPS, lookups(tf.constant(IDS, tf.int64)), strict=True):
        np.testing.assert_array_equal(rows, VALUE[IDS], name)
    for lookup in LOOKUPS.values():
        np.testing.assert_array_equal(lookup(table, IDS), VALUE[IDS])
    np.testing.assert_array_equal(tf.gather(table, [IDS, IDS]), VALUE[[IDS, IDS]])
    assert tf.gather(table, tf.zeros([0], tf.int32)).shape == (0, 2)
    np.testing.assert_array_equal(tf.gather_nd(table, [[9, 1], [0, 0]]), [19, 0])
    for outside in (-1, 10):
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.gather(table, [outside])


def gradient(table, compute):
    with tf.GradientTape() as tape:
        loss = compute()
    return tape.gradient(loss, table)


def squares(table):
    return tf.reduce_sum(tf.gather(table, IDS) ** 2)


def test_gradients_have_the_row_numbers_of_the_whole_variable(table):
    inner = tf.function(lambda: squares(table))
    inner_dense = tf.function(lambda: tf.reduce_sum(table**2))
    ways = {
        "eager": lambda: gradient(table, lambda: squares(table)),
        "function": tf.function(lambda: gradient(table, lambda: squares(table))),
        "of a function": lambda: gradient(table, inner),
        "of a function in a function": tf.function(lambda: gradient(table, inner)),
        "branch": tf.function(
            lambda yes: gradient(table, lambda: tf.cond(yes, lambda: squares(table), lambda: tf.constant(0.0)))
        ),
    }
    for name, way in ways.items():
        found = way(tf.constant(True)) if name == "branch" else way()
        assert isinstance(found, tf.IndexedSlices), name
        np.testing.assert_array_equal(found.indices, IDS, name)
        np.testing.assert_array_equal(found.values, 2 * VALUE[IDS], name)
        np.testing.assert_array_equal(found.dense_shape, [10, 2], name)
    for way in (lambda: gradient(table, inner_dense), tf.function(lambda: gradient(table, inner_dense))):
        np.testing.assert_array_equal(way(), 2 * VALUE)


SCATTERS = ("add", "sub", "max", "min", "mul", "div", "update")


def test_scatters_change_the_rows_that_they_change_in_one_piece(table):
    whole = tf.Variable(VALUE)
    for kind in SCATTERS:
        slices = tf.IndexedSlices(DELTA, ROWS)
        assert getattr(table, f"scatter_{kind}")(slices) is table
        getattr(whole, f"scatter_{kind}")(slices)
        np.testing.assert_array_equal(table.numpy(), whole.numpy(), kind)
    assert table.batch_scatter_update(tf.IndexedSlices(DELTA, ROWS)) is table
    np.testing.assert_array_equal(table.numpy()[ROWS], DELTA)
    for kind in ("add", "sub", "max", "min", "update"):
        for indices, updates in (([[row] for row in ROWS], DELTA), ([[row, 1] for row in ROWS], DELTA[:, 0])):
            for each in (table, whole):
                each.assign(VALUE)
                getattr(each, f"scatter_nd_{kind}")(indices, updates)
            np.testing.assert_array_equal(table.numpy(), whole.numpy(), kind)


def test_assignments_return_the_variable_and_refuse_another_shape(table):
    assert table.assign(VALUE + 1) is table
    table.assign_add(VALUE)
    table.assign_sub(tf.ones([10, 2]))
    np.testing.assert_array_equal(table.numpy(), 2 * VALUE)
    with pytest.raises(ValueError, match=r"shape \(12, 2\) to the variable 'table:0' of shape \(10, 2\)"):
        table.assign(tf.ones([12, 2]))

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def assign(value):
        table.assign(value)

    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        assign(tf.ones([12, 2]))
    np.testing.assert_array_equal(table.numpy(), 2 * VALUE)


@pytest.mark.long
def test_scheduled_steps_lose_nothing(strategy, table):
    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        table.scatter_sub(tape.gradient(loss, table))

    for _ in range(100):
        strategy.schedule(step, args=(np.array([9, 0, 6, 0]),))
    strategy.join(TIMEOUT)
    changes = (VALUE - table.numpy())[:, 0]
    np.testing.assert_array_equal(changes, [200, 0, 0, 0, 0, 0, 100, 0, 0, 100])


INDICES = {
    "row": 7,
    "last row": -1,
    "element": (7, 1),
    "rows": slice(2, 9, 3),
    "rows backwards": slice(None, 1, -2),
    "columns of rows": (slice(3, 8), 1),
    "no rows": slice(5, 5),
    "all": slice(None),
    "ellipsis": (..., 0),
    "new axis": (None, 3),
    "mask": VALUE[:, 0] > 9,
}


def test_indexing_returns_what_it_returns_in_one_piece(table):
    whole = tf.constant(VALUE)
    for name, index in INDICES.items():
        np.testing.assert_array_equal(table[index], whole[index], name)
    np.testing.assert_array_equal(table[tf.constant(-2)], VALUE[-2])
    for outside in (10, -11):
        with pytest.raises(IndexError, match="out of bounds for 'table:0', which has 10 rows"):
            table[outside]
    some = tf.function(lambda row: (table[row], table[2:4])).get_concrete_function(tf.TensorSpec([], tf.int32))
    assert "ReadVariableOp" not in operations(some.graph)
