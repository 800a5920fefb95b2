"""A client that is killed and restarted continues from its checkpoint; servers keep nothing of the old one."""

import json
import re

import pytest

from coordinator.testing import LocalCluster

pytestmark = pytest.mark.cluster

RESTARTS = 10
MEGABYTES = 100

# Continues from the latest checkpoint, trains one more step, saves, prints a server's memory, and is killed.
CLIENT = """
    import json, os, signal, sys

    import psutil
    import tensorflow as tf

    import coordinator

    spec, folder, server, megabytes = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    strategy = coordinator.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), task_type="chief", task_id=0)
    )
    with strategy.scope():
        step = tf.Variable(0)
        weights = tf.Variable(lambda: tf.zeros([megabytes, 2**18]))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(step=step), folder, max_to_keep=2)
    resumed = manager.restore_or_initialize()
    began = int(step)

    @tf.function
    def train():
        return step.assign_add(1)

    assert strategy.schedule(train).result(60) == began + 1
    manager.save()
    print(began, psutil.Process(server).memory_info().rss, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_client_restarts_use_no_more_server_memory_than_one(run_program, tmp_path):
    used = []
    with LocalCluster(workers=1, ps=1) as cluster:
        for restart in range(RESTARTS + 1):
            arguments = json.dumps(cluster.spec), tmp_path / "checkpoints", cluster.pid("ps", 0), MEGABYTES
            began, size = run_program(CLIENT, *arguments, exit_code=-9).stdout.split()
            assert int(began) == restart, "a client continues from the checkpoint of the last one"
            used.append(int(size))
        most = highest_memory(cluster.pid("ps", 0))
    assert used[-1] <= 1.2 * used[1], used
    assert most <= max(used) + 0.5 * (MEGABYTES << 20), "the old variables are freed before the new ones are created"


def highest_memory(pid):
    """Returns the peak memory use of a process, in bytes."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        return int(re.search(r"^VmHWM:\s+(\d+) kB$", status.read(), re.MULTILINE)[1]) << 10


# Is idle, then busy in one step, each for longer than servers keep the resources of a silent client; then
# stops for that long, which is too much.
SILENT = """
    import os, signal, subprocess, sys, threading

    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    TIMEOUT = 4.0

    def stand_still(seconds):
        wake = f"os.kill({os.getpid()}, signal.SIGCONT)"
        waker = f"import os, signal, threading; threading.Event().wait({seconds}); {wake}"
        with subprocess.Popen([sys.executable, "-c", waker]):
            os.kill(os.getpid(), signal.SIGSTOP)

    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = coordinator.ParameterServerStrategy(
            cluster.resolver, options=coordinator.Options(client_timeout=TIMEOUT)
        )
        with strategy.scope():
            count = tf.Variable(0)

        @tf.function
        def take(seconds):
            end = tf.timestamp() + seconds
            while tf.timestamp() < end:
                tf.linalg.matmul(tf.ones([100, 100]), tf.ones([100, 100]))
            return count.assign_add(1)

        assert strategy.schedule(take, args=(0.0,)).result(60) == 1
        threading.Event().wait(3 * TIMEOUT)
        assert count.numpy() == 1, "idle"
        assert strategy.schedule(take, args=(3 * TIMEOUT,)).result(60) == 2, "busy"
        stand_still(TIMEOUT / 4)
        assert strategy.schedule(take, args=(0.0,)).result(60) == 3, "still for a moment"
        assert strategy.parameter_servers[0].healthy() and strategy.cluster.workers[0].healthy()
        stand_still(3 * TIMEOUT)
        assert not strategy.parameter_servers[0].healthy(), "still for too long"
        strategy.close()
        print("heard")
"""


@pytest.mark.long
def test_a_paused_client_keeps_its_variables(run_program):
    assert "heard" in run_program(SILENT, timeout=240).stdout


@pytest.mark.long
def test_a_running_client_keeps_its_variables_when_another_one_connects(
    run_program, shared_cluster, strategy, tmp_path
):
    import tensorflow as tf

    with strategy.scope():
        variables = [tf.Variable(number) for number in range(2)]
    arguments = json.dumps(shared_cluster.spec), tmp_path / "checkpoints", shared_cluster.pid("ps", 0), 1
    for _ in range(2):
        run_program(CLIENT, *arguments, exit_code=-9)
    assert [variable.numpy() for variable in variables] == [0, 1]
    assert strategy.schedule(tf.function(lambda: variables[0] + variables[1])).result(60) == 1
