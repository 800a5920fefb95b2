"""Tests of saving large variables on clusters of their own: memory, delays, and servers that are lost meanwhile."""

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SAVING = """
    import sys
    import tempfile
    import threading

    import psutil
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    ROWS = 16_000_000

    @tf.function
    def longest_update():
        def update(number, before, longest):
            rows, change = tf.random.uniform([4096, 1], 0, ROWS, tf.int64), tf.ones([4096, 16])
            read = tf.gather_nd(table, rows)
            with tf.control_dependencies([read, table.scatter_nd_sub(rows, change).handle]):
                now = tf.timestamp()
            return number + 1, now, tf.maximum(longest, now - before)

        start = [0, tf.timestamp(), tf.constant(0.0, tf.float64)]
        return tf.while_loop(lambda number, *_: number < 20, update, start, parallel_iterations=1)[2]

    options = coordinator.Options(checkpoint_memory=int(sys.argv[1]))
    with (
        LocalCluster(workers=1, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        with strategy.scope():
            table = tf.Variable(lambda: tf.ones([ROWS, 16]))
        server = psutil.Process(cluster.pid("ps", 0))
        ended, delays, memory = threading.Event(), [], []

        def train():
            while not ended.is_set():
                delays.append(float(strategy.schedule(longest_update).result(60)))

        def watch():
            while not ended.wait(0.005):
                memory.append(server.memory_info().rss)

        for _ in range(3):
            strategy.schedule(longest_update).result(60)
        checkpoint, folder = tf.train.Checkpoint(table=table), tempfile.mkdtemp(dir=".")
        before = server.memory_info().rss
        threads = [threading.Thread(target=train), threading.Thread(target=watch)]
        [thread.start() for thread in threads]
        checkpoint.write(folder + "/saved")
        checkpoint.read(folder + "/saved")
        ended.set()
        [thread.join() for thread in threads]
        # Only now are updates known that waited until the end.
        print(max(memory) - before, max(delays))
"""


def test_saving_and_restoring_1_gb_needs_64_mb_and_delays_updates_far_less(run_program):
    added, longest = map(float, run_program(SAVING, 2**26, timeout=140).stdout.split())
    assert added <= 64 * 2**20
    added, longest_of_tensorflow = map(float, run_program(SAVING, 2**40, timeout=140).stdout.split())
    assert added > 900 * 2**20
    # On an idle machine a twentieth.
    assert longest < longest_of_tensorflow / 2


LOSING = """
    import pathlib
    import tempfile
    import threading
    import time

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
            while not list(folder.glob("ckpt-2_temp/part-ps0-*5.index")):
                time.sleep(0.001)
            cluster.kill("ps", 0)
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
        print("saved")
"""


def test_a_server_that_is_lost_while_blocks_are_saved_is_recovered_and_all_is_saved(run_program):
    assert run_program(LOSING, timeout=200).stdout.split() == ["saved"]
