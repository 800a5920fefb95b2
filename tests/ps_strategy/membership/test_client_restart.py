"""A client that is killed and restarted continues from its checkpoint; servers keep nothing of the old one."""

import json
import re

import pytest
import tensorflow as tf

from coordinator.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]

RESTARTS = 3
MEGABYTES = 100

# Continues from the latest checkpoint, trains one more step, saves, prints a server's memory, and is killed.
CLIENT = """
    import json, os, signal, sys

    import psutil
    import tensorflow as tf

    from tests.ps_strategy.failure_programs.trainer import connect

    spec, folder, server, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    strategy = connect(spec)
    with strategy.scope():
        step = tf.Variable(0)
        weights = tf.Variable(lambda: tf.zeros([megabytes, 2**18]))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(step=step), folder, max_to_keep=2)
    manager.restore_or_initialize()
    began = int(step)
    assert strategy.schedule(tf.function(lambda: step.assign_add(1))).result(60) == began + 1
    manager.save()
    print(began, psutil.Process(server).memory_info().rss, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_client_restarts_use_no_more_server_memory_than_one(run_program, tmp_path):
    used = []
    with LocalCluster(workers=1, ps=1) as cluster:
        server = cluster.pid("ps", 0)
        for restart in range(RESTARTS + 1):
            arguments = json.dumps(cluster.spec), tmp_path / "checkpoints", server, MEGABYTES
            began, size = run_program(CLIENT, *arguments, exit_code=-9).stdout.split()
            assert int(began) == restart, "a client continues from the checkpoint of the last one"
            used.append(int(size))
        with open(f"/proc/{server}/status", encoding="utf-8") as status:
            most = int(re.search(r"^VmHWM:\s+(\d+) kB$", status.read(), re.MULTILINE)[1]) << 10
    assert used[-1] <= 1.2 * used[1], used
    assert most <= max(used) + 0.5 * (MEGABYTES << 20), "the old variables are freed before the new ones are created"


# Waits for one step that lasts longer than servers keep the resources of a silent client; then stops for that long,
# which is too much.
SILENT = """
    import os, signal, subprocess, sys

    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    TIMEOUT = 4.0

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

        assert strategy.schedule(take, args=(2 * TIMEOUT,)).result(60) == 1
        assert count.numpy() == 1
        wake = f"os.kill({os.getpid()}, signal.SIGCONT)"
        waker = f"import os, signal, threading; threading.Event().wait({3 * TIMEOUT}); {wake}"
        with subprocess.Popen([sys.executable, "-c", waker]):
            os.kill(os.getpid(), signal.SIGSTOP)
        assert not strategy.parameter_servers[0].healthy(), "still for too long"
        strategy.close()
"""


def test_a_waiting_client_keeps_its_variables_and_a_stopped_one_loses_them(run_program):
    run_program(SILENT)


def test_a_running_client_keeps_its_variables_when_another_one_connects(
    run_program, shared_cluster, strategy, tmp_path
):
    with strategy.scope():
        variables = [tf.Variable(number) for number in range(2)]
    arguments = json.dumps(shared_cluster.spec), tmp_path / "checkpoints", shared_cluster.pid("ps", 0), 1
    run_program(CLIENT, *arguments, exit_code=-9)
    assert [variable.numpy() for variable in variables] == [0, 1]
    assert strategy.schedule(tf.function(lambda: variables[0] + variables[1])).result(60) == 1
