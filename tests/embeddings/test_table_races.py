"""Tests of look-ups, gradients and evictions at the same time; and of an index that is derived from the rows again."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, OlderThan, Table
from tests.embeddings.tables import make_table

DEFAULT = -1.0
KEYS = 400


def key_in_each_column(keys, dim):
    return tf.repeat(tf.cast(keys, tf.float32)[:, tf.newaxis], dim, axis=1)


def leave(rows, gradient):
    rows.assign_sub(0.0 * gradient)


def add(rows, gradient):
    rows.assign_add(gradient)


@pytest.mark.long
def test_no_look_up_sees_the_row_of_another_key_while_rows_are_evicted(strategy):
    table = make_table(
        strategy,
        KEYS // 4,
        leave,
        initializer=key_in_each_column,
        eviction=OlderThan(1),
        when_full="evict_oldest",
        default=DEFAULT,
    )

    @tf.function
    def step():
        keys = tf.random.uniform([40], 0, KEYS, tf.int64)
        with tf.GradientTape() as tape:
            trained = table.lookup(keys[:20], training=True)
            rows = tf.concat([trained, table.lookup(keys[20:])], 0)
        table.apply_gradients(tape.gradient(trained, table.variable))
        is_own = rows == tf.cast(keys, tf.float32)[:, tf.newaxis]
        is_default = tf.reduce_all(rows == DEFAULT, axis=1, keepdims=True)
        return tf.math.count_nonzero(tf.logical_not(tf.logical_or(is_own, is_default)))

    futures = [strategy.schedule(step) for _ in range(100)]
    evicted = 0
    while not strategy.done():
        evicted += table.evict()
    assert [future.result() for future in futures] == [0] * len(futures)
    statistics = table.statistics()
    assert statistics.evicted >= evicted > 0
    assert statistics.admitted - statistics.evicted == statistics.size <= KEYS // 4
    rows = [shard.read_rows(0, KEYS) for shard in table.shards]
    keys = np.concatenate([keys for keys, *_ in rows])
    assert len(np.unique(keys)) == len(keys) == statistics.size
    np.testing.assert_array_equal(np.concatenate([part[1] for part in rows])[:, 0], keys)


@pytest.mark.long
def test_no_look_up_sees_a_part_of_an_update(strategy):
    width, size = 4096, 64
    with strategy.scope():
        table = Table("wide", width, 2 * size, add, initializer=Constant(0.0))

    @tf.function
    def step():
        keys = tf.range(size, dtype=tf.int64)
        table.lookup(keys, training=True)
        table.apply_gradients(tf.IndexedSlices(tf.ones([size, width]), keys))
        found = [table.lookup(keys) for _ in range(4)]
        return tf.math.count_nonzero([rows != rows[:, :1] for rows in found])

    futures = [strategy.schedule(step) for _ in range(100)]
    assert [future.result() for future in futures] == [0] * len(futures)
    np.testing.assert_array_equal(table.lookup(np.arange(size)), np.full([size, width], len(futures)))
