"""Tests of tables: keys get rows when they are trained on, gradients change them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, Table, Uniform

TIMEOUT = 120.0
DIM = 4


def subtract(rows, gradient):
    rows.assign_sub(0.5 * gradient)


def make_table(strategy, capacity=1000, optimizer=subtract, **options):
    with strategy.scope():
        return Table("words", DIM, capacity, optimizer, **options)


def keys_of(*values):
    return tf.constant(values, tf.int64)


def train(strategy, table, keys, weights=None):
    """Runs one step whose gradient for each looked-up row is its weight, 1 by default."""

    @tf.function
    def step(keys, weights):
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
            loss = tf.reduce_sum(rows * weights[..., tf.newaxis])
        table.apply_gradients(tape.gradient(loss, table.variable))
        return rows

    keys = tf.constant(keys)
    weights = tf.ones(keys.shape) if weights is None else tf.constant(weights, tf.float32)
    return strategy.schedule(step, args=(keys, weights)).result(TIMEOUT)


def test_keys_get_rows_in_training_alone(strategy):
    table = make_table(strategy, default=0.25)
    keys = keys_of(3, 10**15, -7)
    np.testing.assert_array_equal(table.lookup(keys), np.full([3, DIM], 0.25))
    assert table.size() == 0
    rows = train(strategy, table, [[3, 10**15], [-7, 3]])
    assert rows.shape == (2, 2, DIM)
    np.testing.assert_allclose(rows, Uniform()(tf.constant([3, 10**15, -7, 3], tf.int64), DIM).numpy().reshape(2, 2, DIM))
    assert table.size() == 3
    # The gradient of key 3 is the sum of its two places.
    np.testing.assert_allclose(table.lookup(keys) - Uniform()(keys, DIM), [[-1] * DIM, [-0.5] * DIM, [-0.5] * DIM], atol=1e-6)
    assert table.lookup(keys_of(3, 4))[1].numpy().tolist() == [0.25] * DIM
    statistics = table.statistics()
    assert (statistics.size, statistics.admitted, statistics.steps, statistics.dropped) == (3, 3, 1, 0)
