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

    for ids in (IDS, IDS[::-1], [3] * len(IDS)):
        found = strategy.schedule(in_step, args=(np.array(ids),)).result(TIMEOUT)
        for name, look_up in READS.items():
            expected = look_up(tf.constant(TABLE), tf.constant(ids))
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["sparse_read"], TABLE[ids])
        assert found["none"].shape == (0, WIDTH)


@pytest.mark.long
def test_every_read_on_the_client_has_the_rows_in_the_order_of_their_indices(table):
    for name, look_up in READS.items():
        expected = look_up(tf.constant(TABLE), tf.constant(IDS))
        np.testing.assert_allclose(look_up(table, tf.constant(IDS)), expected, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(table.sparse_read(IDS), TABLE[IDS])


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
