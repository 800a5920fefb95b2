"""Tests that the parts of a sharded variable come back after the loss of a parameter server."""

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_store import VariableStore
from tests.ps_strategy.sharded.partitioners import partitioned, sharded

TIMEOUT = 120.0
VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)


def ones(partition_shape, partition_offset):
    return tf.ones(partition_shape)


def test_parts_are_recreated_in_the_same_objects(strategy, monkeypatch, tmp_path, recorded_functions):
    store = VariableStore(recorded_functions)
    monkeypatch.setattr(strategy.extended, "_variables", store)
    saved = sharded(strategy, VALUE, 3)
    with strategy.scope(), partitioned(3):
        unsaved = tf.Variable(ones, shape=[10, 2], dtype=tf.float32)
    checkpoint = tf.train.Checkpoint(table=saved)
    path = checkpoint.write(str(tmp_path / "saved"))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(saved, ids) + tf.gather(unsaved, ids))
        for table, gradient in zip((saved, unsaved), tape.gradient(loss, (saved, unsaved)), strict=True):
            table.scatter_add(gradient)

    strategy.schedule(step, args=([9, 0, 4],)).result(TIMEOUT)
    store.renew()
    assert not bool(saved.is_initialized())
    checkpoint.read(path)
    store.initialize_rest()
    np.testing.assert_array_equal(saved.numpy(), VALUE)
    np.testing.assert_array_equal(unsaved.numpy(), np.ones_like(VALUE))
    strategy.schedule(step, args=([9, 0, 4],)).result(TIMEOUT)
    assert (saved.numpy() - VALUE)[:, 0].tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
