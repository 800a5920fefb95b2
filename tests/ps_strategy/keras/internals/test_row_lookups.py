"""Tests that a Keras embedding reads and updates only the rows of a batch; the table stays on its parameter server."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.updates.transport.pull_steps import reads_of, result, traced

ROWS, WIDTH = 40, 3
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
IDS = [[1, 39, -1], [7, 1, -40]]


class Recommender(keras.Model):
    """A layer that looks up rows of its table, as programs do that do not use `keras.layers.Embedding`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = self.add_weight(shape=(ROWS, WIDTH), initializer=lambda shape, dtype: tf.constant(TABLE, dtype))

    def call(self, ids):
        return keras.ops.take(self.table, ids, axis=0)


@pytest.fixture
def embedding(strategy):
    with strategy.scope():
        return keras.layers.Embedding(ROWS, WIDTH, weights=TABLE)


def test_only_the_rows_that_are_looked_up_are_read_and_their_gradient_is_sparse(strategy, embedding):
    table = embedding.embeddings.value

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = embedding(ids)
            loss = tf.reduce_sum(rows)
        gradient = tape.gradient(loss, embedding.trainable_variables[0])
        assert isinstance(gradient, tf.IndexedSlices)
        return rows, gradient.indices, tf.convert_to_tensor(gradient)

    dense, ragged = tf.constant(IDS), tf.ragged.constant([[1, 39], [-1], []])
    for ids in (dense, tf.cast(dense, tf.int64), tf.cast(dense, tf.int8), ragged):
        assert reads_of(traced(strategy, step, ids), table) == ["ResourceGather"]

    rows, indices, gradient = result(strategy, step, dense)
    np.testing.assert_array_equal(rows, TABLE[IDS])
    assert indices.tolist() == [1, 39, 39, 7, 1, 0]
    np.testing.assert_array_equal(gradient[:, 0], np.bincount(indices, minlength=ROWS))
    rows, indices, _ = result(strategy, step, ragged)
    assert rows.to_list() == [TABLE[[1, 39]].tolist(), TABLE[[39]].tolist(), []]
    assert indices.tolist() == [1, 39, 39]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"40 is not in \[0, 40\)"):
        result(strategy, tf.function(embedding), tf.constant([[40]]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join()
    # On the client as well, outside of any function.
    np.testing.assert_array_equal(embedding(dense), TABLE[IDS])


def test_other_reads_than_row_lookups_work_as_usual(strategy, embedding):
    table = embedding.embeddings

    @tf.function
    def step(sparse_ids):
        columns = keras.ops.take(table, [2, -1], axis=1)
        elements = keras.ops.take(table, [4, -1])
        return columns, elements, tf.sparse.to_dense(sparse_ids), embedding(sparse_ids)

    columns, elements, ids, rows = result(strategy, step, tf.sparse.from_dense([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(columns, TABLE[:, [2, 2]])
    np.testing.assert_array_equal(elements, [4.0, ROWS * WIDTH - 1])
    np.testing.assert_array_equal(rows, TABLE[ids])
    # The lookup is in the value that replaces the variable, not in the variable.
    with keras.StatelessScope(state_mapping=[(table, -TABLE)]):
        np.testing.assert_array_equal(keras.ops.take(table, [2], axis=0), -TABLE[[2]])


def test_a_layer_that_looks_up_rows_reads_only_them_in_its_own_precision(strategy):
    with strategy.scope():
        model = Recommender(dtype="mixed_bfloat16")
    step = tf.function(model)
    concrete = traced(strategy, step, tf.constant(IDS))
    assert reads_of(concrete, model.table.value) == ["ResourceGather"]
    rows = strategy.schedule(step, args=(tf.constant(IDS),)).result()
    assert rows.dtype == "bfloat16"
    np.testing.assert_array_equal(rows.astype(np.float32), TABLE[IDS])
    assert model.table.dtype == "float32"
