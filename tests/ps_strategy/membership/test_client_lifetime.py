"""Programs that connect, close, fork, are stopped, killed and started again: what they leave behind."""

import json
import re
import signal
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.failure_programs import closing_client, memory_use, trainer


def test_a_second_strategy_is_refused_while_one_is_open(shared_cluster, strategy):  # row 5
    with pytest.raises(RuntimeError, match=r"close the first one \(strategy\.close\(\)\) before making another"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)
    assert unhealthy(strategy) == ()


def test_another_backend_of_keras_is_refused(shared_cluster, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"Keras runs on 'jax' in this process.*Set KERAS_BACKEND=tensorflow"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)


def test_a_client_that_was_killed_starts_again_on_the_same_servers(run_program, shared_cluster, strategy):  # row 87
    with strategy.scope():
        variables = [tf.Variable(number) for number in (3, 4)]
    source, spec = Path(trainer.__file__).read_text(), json.dumps(shared_cluster.spec)
    killed = run_program(source, spec, "killed", exit_code=-signal.SIGKILL)
    again = run_program(source, spec, "to the end")
    assert killed.stdout == "10 steps\n"
    assert again.stdout == "10 steps\n10 more\n"
    # The servers have freed nothing of this process, which runs.
    assert strategy.schedule(tf.function(lambda: variables[0] + variables[1])).result(60) == 7


@pytest.fixture
def end(run_program, shared_cluster):
    """Runs a program to its end, and returns its stderr."""

    def end(ending: str) -> str:
        source = Path(closing_client.__file__).read_text()
        errors = run_program(source, json.dumps(shared_cluster.spec), ending).stderr
        assert "Traceback" not in errors, errors
        return errors

    return end


def test_every_way_to_close_leaves_nothing_behind(end):  # row 72
    end("close_in_every_way_then_end")


@pytest.mark.long
def test_tensorflow_may_be_reset_under_an_open_strategy(end):
    assert end("reset_tensorflow").count("TensorFlow is being reset, which closes the strategy") == 1


@pytest.mark.long
def test_a_program_ends_while_a_worker_is_dead(end, shared_cluster):
    shared_cluster.kill("worker", 1)
    try:
        end("end_while_functions_run")
    finally:
        shared_cluster.restart("worker", 1)


RESTARTS = 2
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


@pytest.mark.cluster
@pytest.mark.long
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

    TIMEOUT = 3.0

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


@pytest.mark.cluster
@pytest.mark.long
def test_a_waiting_client_keeps_its_variables_and_a_stopped_one_loses_them(run_program):
    run_program(SILENT)


# The client grows by less than 5 % in 50 repetitions, and so does a parameter server, unless workers were restarted.
# Then it grows by 0.65 MB and four threads with each restart, but by 0.03 MB with as many steps and no restart. That is
# TensorFlow's: in a program without this library, which names a restarted worker in `update_server_def` and calls one
# function there that adds to a variable 500 times, the parameter server grows by 1.5 MB and four threads each time (30
# restarts), and the client by 0.17 MB and eight threads.
REPETITIONS = 50
# Until then functions of all sizes are traced, and the processes' own caches fill.
WARM_UP = 15
GROWTH = 1.05
BYTES_PER_RESTART = 1e6


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["opened", "restarted"])
def test_fifty_repetitions_need_little_more_memory(run_program, kind: str) -> None:
    program = run_program(Path(memory_use.__file__).read_text(), kind, WARM_UP + REPETITIONS, timeout=1700)
    used = [[int(size) for size in line.split()] for line in program.stdout.splitlines()[-WARM_UP - REPETITIONS :]]
    assert len(used) == WARM_UP + REPETITIONS
    for process, (before, after) in enumerate(zip(used[WARM_UP - 1], used[-1], strict=True)):
        # Process 0 is the client.
        is_server_of_restarted = kind == "restarted" and process > 0
        most = before + REPETITIONS * BYTES_PER_RESTART if is_server_of_restarted else GROWTH * before
        assert after <= most, f"process {process}: {[sizes[process] for sizes in used]}"
