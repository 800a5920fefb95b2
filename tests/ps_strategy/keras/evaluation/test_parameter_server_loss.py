"""Tests that evaluations go on, and count each example once, when a parameter server is lost and restored."""

import pytest

PROGRAM = """
    import tempfile
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    x = np.arange(4000, dtype=np.float32)[:, None]
    with LocalCluster(workers=2, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tempfile.mkdtemp(), 1)
        strategy.restore_from(manager)
        manager.save()
        source = coordinator.data.arrays(x, x)
        metrics = [keras.metrics.MeanSquaredError(name="error"), keras.metrics.Mean(name="mean")]
        metrics[1].update_state = lambda y, outputs: keras.metrics.Mean.update_state(metrics[1], outputs)
        for state in ("snapshot", "now"):
            for kills in (False, True, True):
                killing = threading.Thread(target=cluster.restart, args=("ps", 0))
                if kills:
                    killing.start()
                found = strategy.evaluate(model, source, metrics, batch_size=1, shards=8, model_state=state)
                if kills:
                    killing.join()
                np.testing.assert_allclose([found["error"], found["mean"]], [0, 1999.5], rtol=1e-5)
                # The copies of a snapshot belong to no checkpoint.
                assert manager.save()
"""


@pytest.mark.cluster
@pytest.mark.long
def test_each_example_counts_once_when_a_parameter_server_is_restored(run_program) -> None:
    run_program(PROGRAM, timeout=280)
