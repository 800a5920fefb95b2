"""Servers that end with their client, and those of a client that may be started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from coordinator.launch.server_process import free_addresses
from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.long]

TIMEOUT = 120.0

PROGRAM = """
    import json, os, signal, sys

    import tensorflow as tf

    import coordinator

    cluster, ending = json.loads(sys.argv[1]), sys.argv[2]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = coordinator.ParameterServerStrategy(resolver)
    assert strategy.schedule(tf.function(lambda: tf.constant(5))).result(60) == 5
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "error":
        raise ValueError("an error that nothing catches")
    if ending == "notebook":
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell("1 / 0")
        shell.run_cell("import sys; sys.exit(3)")
    if ending == "exit":
        with strategy:
            sys.exit(143)
    if ending == "twice":
        strategy.close()
        with coordinator.ParameterServerStrategy(resolver) as strategy:
            assert strategy.schedule(tf.function(lambda: tf.constant(5))).result(60) == 5
"""


@contextlib.contextmanager
def running(job: str, address: str) -> Iterator["subprocess.Popen[str]"]:
    task = ["--job", job, "--index", "0", "--address", address]
    options = ["--until-client-ends", "--exit-with-parent", "--health-port", "0"]
    command = [sys.executable, "-m", "coordinator", "serve", *task, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while not (line := server.stdout.readline()).startswith(f"coordinator: /job:{job}/task:0 answers /healthz"):
            assert server.poll() is None
        with urllib.request.urlopen(f"http://127.0.0.1:{line.rpartition(' ')[2].strip()}/healthz", timeout=60) as reply:
            assert json.load(reply) == {"task": f"/job:{job}/task:0", "serving": True, "clients": 0}
        yield server
        server.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("last", ["normal", "twice", "notebook"])
def test_servers_stay_for_a_client_that_failed_and_end_with_one_that_did_not(
    run_program: ProgramRunner, last: str
) -> None:
    cluster = dict(zip(("worker", "ps"), ([address] for address in free_addresses(2)), strict=True))
    with running("worker", cluster["worker"][0]) as worker, running("ps", cluster["ps"][0]) as ps:
        for ending, code in (("killed", -signal.SIGKILL), ("error", 1), ("exit", 143)):
            run_program(PROGRAM, json.dumps(cluster), ending, exit_code=code)
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(3.0)
        run_program(PROGRAM, json.dumps(cluster), last)
        for server in (worker, ps):
            assert server.wait(TIMEOUT) == os.EX_OK
            assert server.stdout is not None
            assert server.stdout.read().endswith("ends: its client has ended\n")
