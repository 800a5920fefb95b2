"""`coordinator serve`: where a server is reached, and when it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests.cli.conftest import Environment
from tests.heartbeat.reach import MOMENT, answers, own_ipv4_address
from tests.launch.command_process import CommandProcess
from tests.program_runner import ProgramRunner

TIMEOUT = 120.0


def test_a_port_in_use_is_refused_for_the_server_and_for_health(capsys: pytest.CaptureFixture[str]) -> None:
    [address] = free_addresses(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "--job", "worker", "--index", "0", "--address", f"127.0.0.1:{port}"]) == 2
        assert f"cannot serve on 127.0.0.1:{port}: port {port}: Address already in use" in capsys.readouterr().err
        assert main(["serve", "--job", "ps", "--index", "4", "--address", address, "--health-port", port]) == 2
    words = f"health on port {port}: Address already in use. Give it another --health-port."
    assert capsys.readouterr().err == f"coordinator serve: /job:ps/task:4 cannot report its {words}\n"


@pytest.mark.parametrize("ending", ["SIGTERM", "end of input", "silence"])
def test_a_server_reports_that_it_serves_and_ends_with_code_0(environment: Environment, ending: str) -> None:
    task = ["--job", "worker", "--index", "0", "--address", *free_addresses(1)]
    command = [sys.executable, "-m", "coordinator", "serve", *task, "--exit-with-parent"]
    command += ["0.2"] * (ending == "silence")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        if ending != "silence":
            while not (line := server.stdout.readline()).startswith("coordinator: "):
                assert line, "The server ended."
            assert line.startswith("coordinator: /job:worker/task:0 serves on 127.0.0.1:")
            if ending == "SIGTERM":
                server.send_signal(signal.SIGTERM)
            else:
                server.stdin.close()
        assert server.wait(TIMEOUT) == 0
        assert ending == "silence" or server.stdout.read() == ""


@pytest.mark.parametrize(
    ("options", "reached"),
    [(["--interface"], {"own"}), ([], {"loopback", "own"})],
    ids=["one interface", "all"],
)
def test_a_server_is_reached_where_it_should_and_says_if_that_is_everywhere(
    environment: Environment, options: list[str], reached: set[str]
) -> None:
    hosts = {"loopback": "127.0.0.1", "own": own_ipv4_address()}
    port = int(free_addresses(1)[0].rpartition(":")[2])
    address = f"{hosts['own']}:{port}"
    task = ["--job", "worker", "--index", "0", "--address", address, *([*options, hosts["own"]] if options else [])]
    with CommandProcess("serve", *task, environment=environment) as command:
        said = command.wait_output(rf"serves on {address}(.*?)\r?\n")[1]
        assert {name for name, host in hosts.items() if answers(host, port, MOMENT)} == reached
    is_open = len(reached) == 2
    assert said == (", open to every machine that reaches the port; see docs/security.md" if is_open else "")


# A client of a worker and a parameter server, which ends in some way; in the last one it connects twice, and something
# fails in a notebook.
PROGRAM = """
    import json, os, signal, sys

    import tensorflow as tf

    import coordinator

    cluster, ending = json.loads(sys.argv[1]), sys.argv[2]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")

    def connect():
        strategy = coordinator.ParameterServerStrategy(resolver)
        assert strategy.schedule(tf.function(lambda: tf.constant(5))).result(60) == 5
        return strategy

    strategy = connect()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "error":
        raise ValueError("an error that nothing catches")
    if ending == "exit":
        with strategy:
            sys.exit(143)
    strategy.close()
    strategy = connect()
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_cell("1 / 0")
    shell.run_cell("import sys; sys.exit(3)")
"""


@contextlib.contextmanager
def until_client_ends(job: str, address: str) -> Iterator["subprocess.Popen[str]"]:
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


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(900)
def test_servers_stay_for_a_client_that_failed_and_end_with_one_that_did_not(run_program: ProgramRunner) -> None:
    addresses = dict(zip(("worker", "ps"), free_addresses(2), strict=True))
    cluster = json.dumps({job: [address] for job, address in addresses.items()})
    with contextlib.ExitStack() as opened:
        servers = [opened.enter_context(until_client_ends(*each)) for each in addresses.items()]
        # Each client needs the servers that the one before has left.
        for ending, code in (("killed", -signal.SIGKILL), ("error", 1), ("exit", 143), ("well", 0)):
            run_program(PROGRAM, cluster, ending, exit_code=code)
        for server in servers:
            assert server.wait(TIMEOUT) == os.EX_OK
            assert server.stdout is not None
            assert server.stdout.read().endswith("ends: its client has ended\n")
