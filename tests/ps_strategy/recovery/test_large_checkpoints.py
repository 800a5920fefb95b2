"""Tests of saving large variables on clusters of their own: its memory, and a server that is lost meanwhile."""

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SAVING = """
    import tempfile
    import threading

    import psutil
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    ROWS = 16_000_000

    @tf.function
    def update():
        for _ in tf.range(20):
            rows = tf.random.uniform([4096, 1], 0, ROWS, tf.int64)
            table.scatter_nd_sub(rows, tf.ones([4096, 16]))

    options = coordinator.Options(checkpoint_memory=2**26)
    with (
        LocalCluster(workers=1, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        with strategy.scope():
            table = tf.Variable(lambda: tf.ones([ROWS, 16]))
        server = psutil.Process(cluster.pid("ps", 0))
        ended, memory = threading.Event(), []

        def train():
            while not ended.is_set():
                strategy.schedule(update).result(60)

        def watch():
            while not ended.wait(0.005):
                memory.append(server.memory_info().rss)

        for _ in range(3):
            strategy.schedule(update).result(60)
        checkpoint, folder = tf.train.Checkpoint(table=table), tempfile.mkdtemp(dir=".")
        before = server.memory_info().rss
        threads = [threading.Thread(target=train), threading.Thread(target=watch)]
        [thread.start() for thread in threads]
        checkpoint.write(folder + "/saved")
        checkpoint.read(folder + "/saved")
        ended.set()
        [thread.join() for thread in threads]
        print(max(memory) - before)
"""


def test_saving_and_restoring_1_gb_during_updates_needs_64_mb(run_program):
    assert int(run_program(SAVING).stdout) <= 64 * 2**20


LOSING = """
    import pathlib
    import tempfile
    import threading

    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster
    from tests.deadline import wait_until

    options = coordinator.Options(checkpoint_memory=2**20)
    with (
        LocalCluster(workers=1, ps=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        content = np.arange(16_000_000, dtype=np.float32).reshape(-1, 16)
        with strategy.scope():
            tables = [tf.Variable(content), tf.Variable(content + 1), tf.Variable(1)]
        folder = pathlib.Path(tempfile.mkdtemp(dir="."))
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(tables=tables), str(folder), max_to_keep=3)
        strategy.restore_from(manager)
        manager.save()

        def lose():
            wait_until(lambda: list(folder.glob("ckpt-2*")))
            cluster.restart("ps", 0)

        thread = threading.Thread(target=lose)
        thread.start()
        path = manager.save()
        thread.join()
        strategy.join(60)
        assert path == manager.latest_checkpoint and path.endswith("ckpt-2"), path
        for number, table in enumerate(tables[:2]):
            assert (table.numpy() == content + number).all()
            name = f"tables/{number}/.ATTRIBUTES/VARIABLE_VALUE"
            assert (tf.train.load_variable(path, name) == content + number).all()
        assert not [each for each in folder.iterdir() if "temp" in each.name]
        # A thread may end a moment after its call has returned a result.
        wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("coordinator-save")])
"""


def test_a_server_that_is_lost_while_blocks_are_saved_is_recovered_and_all_is_saved(run_program):
    run_program(LOSING)
