"""Tests that rows of a sharded variable are read in the order of their indices, on the servers of their parts alone."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import concrete_function

TIMEOUT = 120.0
ROWS, WIDTH = 10, 2
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
# Of all parts, not in their order, and some twice.
IDS = [7, 1, 9, 1, 0, 4]
WEIGHTS = [1.0, 2.0, 0.5, 1.0, 3.0, 0.25]


def sparse(values, dtype):
    """Returns three rows of values, of which the second is empty."""
    return tf.SparseTensor([[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2]], tf.constant(values, dtype), [3, 3])


# Each takes a variable or a tensor, and ids of rank 1.
READS = {
    "gather": tf.gather,
    "gather, named": lambda table, ids: tf.gather(table, ids, name="rows"),
    "gather, rank 2": lambda table, ids: tf.gather(table, tf.reshape(ids, [2, -1])),
    "gather, scalar": lambda table, ids: tf.gather(table, ids[0]),
    "gather, ragged": lambda table, ids: tf.gather(table, tf.RaggedTensor.from_row_lengths(ids, [2, 0, 4])).flat_values,
    "gather_nd": lambda table, ids: tf.gather_nd(table, tf.stack([ids, ids % WIDTH], 1)),
    "gather_nd, rows": lambda table, ids: tf.gather_nd(table, ids[:, tf.newaxis]),
    "look-up": tf.nn.embedding_lookup,
    "look-up, named": lambda table, ids: tf.nn.embedding_lookup(table, ids, name="rows"),
    "look-up, max_norm": lambda table, ids: tf.nn.embedding_lookup(table, ids, max_norm=2.0),
    "look-up, version 1": tf.compat.v1.nn.embedding_lookup,
    "sparse look-up": lambda table, _: tf.nn.embedding_lookup_sparse(
        table, sparse(IDS, tf.int64), sparse(WEIGHTS, tf.float32), combiner="mean"
    ),
    "sparse look-up, named": lambda table, _: tf.nn.embedding_lookup_sparse(
        table, sparse(IDS, tf.int64), None, combiner="sqrtn", name="rows"
    ),
    "safe sparse look-up": lambda table, _: tf.nn.safe_embedding_lookup_sparse(
        table, sparse(IDS, tf.int64), None, combiner="sum", default_id=8
    ),
}


@pytest.fixture(scope="module")
def table(sharded):
    return sharded(TABLE, parts=3)


def all_reads(table):
    @tf.function
    def read(ids):
        return {name: look_up(table, ids) for name, look_up in READS.items()}

    return read


def expected(ids):
    return {name: look_up(tf.constant(TABLE), tf.constant(ids)) for name, look_up in READS.items()}


def test_every_read_in_a_step_has_the_rows_in_the_order_of_their_indices(strategy, table):
    read = all_reads(table)
    for ids in (IDS, IDS[::-1], [3] * len(IDS)):
        found = strategy.schedule(read, args=(np.array(ids),)).result(TIMEOUT)
        for name, rows in expected(ids).items():
            np.testing.assert_allclose(found[name], rows, rtol=1e-6, err_msg=name)


@pytest.mark.long
def test_every_read_on_the_client_has_the_rows_in_the_order_of_their_indices(table):
    ids = tf.constant(IDS)
    for name, rows in expected(IDS).items():
        np.testing.assert_allclose(READS[name](table, ids), rows, rtol=1e-6, err_msg=name)


@pytest.mark.long
def test_methods_of_the_variable_read_rows_in_the_order_of_their_indices(strategy, table):
    @tf.function
    def read(ids):
        return table.sparse_read(ids), table.gather_nd(tf.stack([ids, ids % WIDTH], 1)), table.sparse_read(ids[:0])

    for ids in (tf.constant(IDS), tf.constant(IDS, tf.int64)):
        for rows, elements, none in (read(ids), strategy.schedule(read, args=(ids,)).result(TIMEOUT)):
            np.testing.assert_array_equal(rows, TABLE[IDS])
            np.testing.assert_array_equal(elements, TABLE[IDS, np.array(IDS) % WIDTH])
            assert none.shape == (0, WIDTH)


def test_a_step_that_reads_rows_reads_no_part_as_a_whole(strategy, table):
    # TensorFlow looks up ragged indices in the whole value of any variable.
    reads = {name: look_up for name, look_up in READS.items() if "ragged" not in name}
    step = tf.function(lambda ids: [look_up(table, ids) for look_up in reads.values()])
    concrete = concrete_function(strategy, step, tf.constant(IDS))
    kinds = {operation.type for operation in concrete.graph.get_operations()}
    assert "ReadVariableOp" not in kinds
    assert "ResourceGather" in kinds


def test_rows_are_read_from_the_servers_of_their_parts(strategy, table):
    concrete = concrete_function(strategy, tf.function(lambda ids: tf.gather(table, ids)), tf.constant(IDS))
    gathers = [each for each in concrete.graph.get_operations() if each.type == "ResourceGather"]
    handles = {id(inner): outer for outer, inner in concrete.graph.captures}
    read = [handles[id(gather.inputs[0])] for gather in gathers]
    assert [any(handle is part.handle for handle in read) for part in table.variables] == [True] * 3


def test_other_axes_and_batches_are_read_as_of_a_tensor(table):
    columns = [1, 0, 1]
    np.testing.assert_array_equal(tf.gather(table, columns, axis=1), TABLE[:, columns])
    rows = np.array([[1], [0]] * (ROWS // 2))
    np.testing.assert_array_equal(tf.gather(table, rows, batch_dims=1), np.take_along_axis(TABLE, rows, 1))


@pytest.mark.parametrize("index", [ROWS, -1])
def test_an_index_out_of_range_is_refused_and_no_other_row_is_returned(table, index):
    for look_up in (tf.gather, tf.nn.embedding_lookup, tf.function(tf.gather)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            look_up(table, tf.constant([0, index, 3]))


def test_a_table_of_vectors_scalars_or_matrices_is_read_by_rows(sharded, strategy):
    for value in (np.arange(7.0), np.arange(60).reshape(5, 3, 4), np.array(["a", "b", "c", "d"])):
        variable = sharded(value, parts=2)
        read = tf.function(lambda ids, variable=variable: tf.gather(variable, ids))
        found = strategy.schedule(read, args=(np.array([3, 0, 3, 1]),)).result(TIMEOUT)
        np.testing.assert_array_equal(found, tf.constant(value).numpy()[[3, 0, 3, 1]])
