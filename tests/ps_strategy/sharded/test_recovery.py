"""Tests that the parts of a sharded variable come back after the loss of a parameter server."""

import numpy as np
import pytest
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


@pytest.mark.cluster
@pytest.mark.long
def test_a_lost_server_comes_back_with_its_parts(run_program, tmp_path):
    run_program(
        """
        import sys
        import numpy as np, tensorflow as tf
        import coordinator
        from coordinator.testing import LocalCluster

        with LocalCluster(workers=2, ps=2) as cluster:
            partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)
            strategy = coordinator.ParameterServerStrategy(cluster.resolver, partitioner)
            with strategy.scope():
                table = tf.Variable(np.zeros([10, 2], np.float32))
            manager = tf.train.CheckpointManager(tf.train.Checkpoint(table=table), sys.argv[1], max_to_keep=2)
            reports = []
            strategy.restore_from(manager, on_rollback=reports.append)

            @tf.function
            def step():
                table.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), [9, 0]))

            def run_five():
                for _ in range(5):
                    strategy.schedule(step)
                strategy.join(120)

            run_five()
            manager.save()
            run_five()
            for server in (1, 0):
                cluster.kill("ps", server)
                cluster.restart("ps", server)
                run_five()
                assert table.numpy()[:, 0].tolist() == [10.0, *[0.0] * 8, 10.0]
            assert len(reports) == 2
            strategy.close()
        """,
        tmp_path / "saved",
        timeout=240,
    )
