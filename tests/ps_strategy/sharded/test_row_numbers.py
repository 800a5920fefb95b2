"""Tests of a sharded variable with more rows than an int32 can count."""

import types

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals import patches
from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable

ROWS = 2**30 + 2**29
FAR = 2 * ROWS - 1


def test_rows_have_numbers_of_any_size_and_kind(monkeypatch):
    # Memory is reserved, and only used where a row is written.
    def part():
        return tf.raw_ops.Empty(shape=[ROWS, 1], dtype=tf.bfloat16, init=False)

    parts = [tf.Variable(part, shape=[ROWS, 1], dtype=tf.bfloat16) for _ in range(2)]
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
        assert (indices.numpy().tolist(), shape.numpy().tolist()) == ([FAR, 0], [2 * ROWS, 1])

    # As if it were on a parameter server.
    monkeypatch.setattr(patches, "_table_on_server", lambda _: table)
    variable = types.SimpleNamespace(_maybe_autocast=lambda rows: rows)
    with patches.row_lookups():
        found = keras.ops.take(variable, tf.constant([0, -1]), axis=0)
    assert found[:, 0].numpy().tolist() == [1, 3]
