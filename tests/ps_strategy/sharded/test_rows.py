"""Tests that rows of a sharded variable are read and changed as those of a plain one, on their servers alone."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.keras.internals import patches
from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable
from tests.ps_strategy.every_worker import concrete_function

TIMEOUT = 120.0
ROWS, WIDTH = 10, 2
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
# Of all parts, not in their order, and some twice.
IDS = [7, 1, 9, 1, 0, 4]


def sparse(values, dtype):
    """Returns three rows of values, of which the second is empty."""
    return tf.SparseTensor([[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2]], tf.cast(values, dtype), [3, 3])


def weighted(table, ids):
    """Looks rows up, and weights them."""
    weights = sparse([1.0, 2.0, 0.5, 1.0, 3.0, 0.25], tf.float32)
    return tf.nn.embedding_lookup_sparse(table, sparse(ids, tf.int64), weights, combiner="mean", name="rows")


def with_default(table, ids):
    return tf.nn.safe_embedding_lookup_sparse(table, sparse(ids, tf.int64), None, combiner="sum", default_id=8)


# Each takes a variable or a tensor, and ids of rank 1.
READS = {
    "gather": tf.gather,
    "gather, named, rank 2": lambda table, ids: tf.gather(table, tf.reshape(ids, [2, -1]), name="rows"),
    "gather, scalar": lambda table, ids: tf.gather(table, ids[0]),
    "gather, ragged": lambda table, ids: tf.gather(table, tf.RaggedTensor.from_row_lengths(ids, [2, 0, 4])).flat_values,
    "gather_nd": lambda table, ids: tf.gather_nd(table, tf.stack([ids, ids % WIDTH], 1)),
    "gather_nd, rows": lambda table, ids: tf.gather_nd(table, ids[:, tf.newaxis]),
    "look-up": tf.nn.embedding_lookup,
    "look-up, named, max_norm": lambda table, ids: tf.nn.embedding_lookup(table, ids, max_norm=2.0, name="rows"),
    "look-up, version 1": tf.compat.v1.nn.embedding_lookup,
    "sparse look-up": weighted,
    "safe sparse look-up": with_default,
}


@pytest.fixture(scope="module")
def table(sharded):
    return sharded(TABLE, parts=3)


def test_every_read_has_the_rows_in_the_order_of_their_indices(strategy, table):
    @tf.function
    def in_step(ids):
        methods = {"sparse_read": table.sparse_read(ids), "none": table.sparse_read(ids[:0])}
        return {**methods, **{name: look_up(table, ids) for name, look_up in READS.items()}}

    for ids in (IDS, [3] * len(IDS)):
        found = strategy.schedule(in_step, args=(np.array(ids),)).result(TIMEOUT)
        for name, look_up in READS.items():
            expected = look_up(tf.constant(TABLE), tf.constant(ids))
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["sparse_read"], TABLE[ids])
        assert found["none"].shape == (0, WIDTH)


def test_a_step_that_reads_rows_reads_no_part_as_a_whole(strategy, table):
    # TensorFlow looks up ragged indices in the whole value of any variable.
    reads = [look_up for name, look_up in READS.items() if "ragged" not in name]
    step = tf.function(lambda ids: [look_up(table, ids) for look_up in reads])
    graph = concrete_function(strategy, step, tf.constant(IDS)).graph
    gathers = [each for each in graph.get_operations() if each.type == "ResourceGather"]
    assert "ReadVariableOp" not in {each.type for each in graph.get_operations()}
    handles = {id(inner): outer for outer, inner in graph.captures}
    read = [handles[id(gather.inputs[0])] for gather in gathers]
    assert all(any(handle is part.handle for handle in read) for part in table.variables)


def test_other_axes_and_batches_are_read_as_of_a_tensor(table):
    columns = [1, 0, 1]
    np.testing.assert_array_equal(tf.gather(table, columns, axis=1), TABLE[:, columns])
    rows = np.array([[1], [0]] * (ROWS // 2))
    np.testing.assert_array_equal(tf.gather(table, rows, batch_dims=1), np.take_along_axis(TABLE, rows, 1))


def test_an_index_out_of_range_is_refused_and_no_other_row_is_returned(table):
    in_function = tf.function(tf.gather)
    for index in (ROWS, -1):
        for look_up in (tf.gather, tf.nn.embedding_lookup, in_function):
            with pytest.raises(tf.errors.InvalidArgumentError):
                look_up(table, tf.constant([0, index, 3]))


def test_a_table_of_vectors_scalars_or_matrices_is_read_by_rows(sharded, strategy):
    values = (np.arange(7.0), np.arange(60).reshape(5, 3, 4), np.array(["a", "b", "c", "d"]))
    tables = [sharded(value, parts=2) for value in values]
    read = tf.function(lambda ids: [tf.gather(table, ids) for table in tables])
    for rows, value in zip(
        strategy.schedule(read, args=(np.array([3, 0, 3, 1]),)).result(TIMEOUT), values, strict=True
    ):
        np.testing.assert_array_equal(rows, tf.constant(value).numpy()[[3, 0, 3, 1]])


CHANGED, COLUMNS = 32, 3
VALUE = np.random.default_rng(0).integers(-9, 9, size=(CHANGED, COLUMNS)).astype(np.float32)
# Of all parts, not in their order.
CHANGED_IDS = [31, 0, 17, 10, 11, 22, 1]
# With repeats, for what does not depend on their order.
REPEATED = [17, 31, 0, 17, 31, 31, 5]
UPDATES = np.random.default_rng(1).integers(1, 5, size=(len(CHANGED_IDS), COLUMNS)).astype(np.float32)
BY_SLICES = ("scatter_add", "scatter_sub", "scatter_min", "scatter_max", "scatter_mul", "scatter_div", "scatter_update")
BY_INDICES = ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_min", "scatter_nd_max", "scatter_nd_update")


def change(variable, method, ids, updates):
    if method in BY_INDICES:
        return getattr(variable, method)(tf.constant(ids)[:, tf.newaxis], updates)
    return getattr(variable, method)(tf.IndexedSlices(updates, tf.constant(ids)))


def all_changes(variable, methods=(*BY_SLICES, *BY_INDICES)):
    """Returns the values after each method."""
    found = {}
    for method in methods:
        with tf.control_dependencies([variable.assign(VALUE)]):
            change(variable, method, CHANGED_IDS if method.endswith("update") else REPEATED, UPDATES)
            found[method] = tf.identity(variable.read_value())
    return found


def test_rows_change_as_those_of_a_plain_variable(strategy, sharded):
    variable, expected = sharded(VALUE, parts=3), all_changes(tf.Variable(VALUE))
    in_step = tf.function(lambda: all_changes(variable, ("scatter_sub", "scatter_max", "scatter_nd_update")))
    for found in (all_changes(variable), strategy.schedule(in_step).result(TIMEOUT)):
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_what_a_change_returns_has_the_new_value(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=2)
    for change_rows in (variable.scatter_add, variable.batch_scatter_update):
        changed = change_rows(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 1])))
        assert np.sum(tf.convert_to_tensor(changed).numpy(), axis=1).tolist() == [0, 2, 0, 0, 2]


def test_single_elements_and_one_number_change_rows_in_a_step(strategy, sharded):
    variable, other = (sharded(np.zeros([5, 2], np.float32), parts=3) for _ in range(2))

    @tf.function
    def step():
        variable.scatter_nd_add([[4, 1], [0, 0], [4, 1]], [1.0, 2.0, 3.0])
        variable.scatter_nd_update([[2, 1]], [7.0])
        other.scatter_add(tf.IndexedSlices(tf.constant(3.0), tf.constant([4, 0, 4])))

    strategy.schedule(step).result(TIMEOUT)
    assert variable.numpy().tolist() == [[2, 0], [0, 0], [0, 7], [0, 0], [0, 4]]
    assert other.numpy().tolist() == [[3, 3], [0, 0], [0, 0], [0, 0], [6, 6]]


def test_other_rows_than_its_own_and_other_changes_are_refused(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=3)
    for method in (*BY_SLICES, *BY_INDICES):
        for index in (5, -1):
            with pytest.raises(tf.errors.InvalidArgumentError):
                change(variable, method, [index], np.ones([1, 2], np.float32))
    for method in BY_SLICES:
        with pytest.raises(TypeError, match="IndexedSlices"):
            getattr(variable, method)(tf.ones([2, 2]))
    assert not variable.numpy().any()


@pytest.mark.long
def test_racing_workers_lose_no_addition(strategy, sharded):
    rows, whole = (sharded(np.zeros([9, 64], np.float32), parts=3) for _ in range(2))
    ids = tf.constant([8, 0, 4, 8])
    in_a_step, steps = 10, 30

    @tf.function
    def step():
        for _ in tf.range(in_a_step):
            rows.scatter_add(tf.IndexedSlices(tf.fill([4, 64], 2.0), ids))
            rows.scatter_sub(tf.IndexedSlices(tf.ones([4, 64]), ids))
            whole.assign_add(tf.fill([9, 64], 3.0))
            whole.assign_sub(tf.ones([9, 64]))

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    count = in_a_step * steps
    expected = np.array([count, 0, 0, 0, count, 0, 0, 0, 2 * count])
    np.testing.assert_array_equal(rows, np.repeat(expected[:, np.newaxis], 64, axis=1))
    np.testing.assert_array_equal(whole, np.full([9, 64], 2 * count))


MANY = 2**30 + 2**29
FAR = 2 * MANY - 1


def test_rows_have_numbers_of_any_size_and_kind(monkeypatch):
    # Memory is reserved, and only used where a row is written.
    def part():
        return tf.raw_ops.Empty(shape=[MANY, 1], dtype=tf.bfloat16, init=False)

    parts = [tf.Variable(part, shape=[MANY, 1], dtype=tf.bfloat16) for _ in range(2)]
    table = ShardedVariable(parts, "table", trainable=True)
    table.scatter_update(tf.IndexedSlices(tf.constant([[1], [2], [3]], tf.bfloat16), [0, 2**31 + 5, FAR]))
    assert table.sparse_read([FAR, 0, 2**31 + 5])[:, 0].numpy().tolist() == [3, 1, 2]
    for index in (FAR, -1, tf.constant(FAR, tf.int64), tf.constant(-1)):
        assert table[index].numpy() == [3]
    assert table[2**31 + 5 : 2**31 + 6].numpy() == [[2]]

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [FAR, 0]))
        found = tape.gradient(loss, table)
        return found.indices, found.dense_shape

    for compute in (gradient, tf.function(gradient)):
        indices, shape = compute()
        assert (indices.numpy().tolist(), shape.numpy().tolist()) == ([FAR, 0], [2 * MANY, 1])

    # As if it were on a parameter server.
    monkeypatch.setattr(patches, "_table_on_server", lambda _: table)
    variable = types.SimpleNamespace(_maybe_autocast=lambda rows: rows)
    with patches.row_lookups():
        found = keras.ops.take(variable, tf.constant([0, -1]), axis=0)
    assert found[:, 0].numpy().tolist() == [1, 3]
