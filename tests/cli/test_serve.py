import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests.cli.conftest import Environment
from tests.heartbeat.reach import MOMENT, answers, own_ipv4_address
from tests.launch.command_process import CommandProcess

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


# How a server is ended, and its exit code.
ENDINGS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "SIGTERM": lambda server: server.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.send_signal(signal.SIGINT),
    "end of input": lambda server: server.stdin and server.stdin.close(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_server_reports_that_it_serves_and_ends_with_code_0(environment: Environment, ending: str) -> None:
    task = ["--job", "worker", "--index", "0", "--address", *free_addresses(1)]
    with subprocess.Popen(
        [sys.executable, "-m", "coordinator", "serve", *task, "--exit-with-parent"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        while not (line := server.stdout.readline()).startswith("coordinator: "):
            assert line, "The server ended."
        assert line.startswith("coordinator: /job:worker/task:0 serves on 127.0.0.1:")
        ENDINGS[ending](server)
        assert server.wait(TIMEOUT) == 0
        assert server.stdout.read() == ""


def test_a_server_ends_when_its_parent_is_silent(environment: Environment) -> None:
    task = ["--job", "worker", "--index", "0", "--address", free_addresses(1)[0]]
    command = [sys.executable, "-m", "coordinator", "serve", *task, "--exit-with-parent", "0.2"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as server:
        assert server.wait(TIMEOUT) == 0


@pytest.mark.parametrize(
    ("is_loopback", "options", "reached"),
    [(True, [], {"loopback"}), (False, ["--interface"], {"own"}), (False, [], {"loopback", "own"})],
    ids=["loopback", "one interface", "all"],
)
def test_a_server_is_reached_where_it_should_and_says_if_that_is_everywhere(
    environment: Environment, is_loopback: bool, options: list[str], reached: set[str]
) -> None:
    hosts = {"loopback": "127.0.0.1", "own": own_ipv4_address()}
    port = int(free_addresses(1)[0].rpartition(":")[2])
    address = f"{hosts['loopback' if is_loopback else 'own']}:{port}"
    task = ["--job", "worker", "--index", "0", "--address", address, *options, *[hosts["own"]] * len(options)]
    with CommandProcess("serve", *task, environment=environment) as command:
        said = command.wait_output(rf"serves on {address}(.*?)\r?\n")[1]
        assert {name for name, host in hosts.items() if answers(host, port, MOMENT)} == reached
    is_open = len(reached) == 2
    assert said == (", open to every machine that reaches the port; see docs/security.md" if is_open else "")
