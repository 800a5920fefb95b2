import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests.cli.conftest import Environment
from tests.heartbeat.reach import MOMENT, answers, own_ipv4_address
from tests.launch.command_process import CommandProcess

TIMEOUT = 120.0


def tf_config(job: str = "worker", index: int = 0, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster or {"worker": ["b:2"]}, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "TF_CONFIG is not set"),
        (" ", "TF_CONFIG is not set"),
        ("nonsense", "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG must be a JSON object"),
        (tf_config("worker", 3, worker=["b:2", "c:3"]), "no task 3 in job 'worker'"),
        (tf_config("chief", chief=["a:1"], worker=["b:2"]), "/job:chief/task:0 is not a server"),
        (tf_config("evaluator", evaluator=["a:1"], worker=["b:2"]), "/job:evaluator/task:0 is not a server"),
    ],
)
def test_a_wrong_task_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("coordinator serve: ")
    assert error.count("\n") == 1


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [address] = free_addresses(1)
    host, _, port = address.partition(":")
    monkeypatch.setenv("TF_CONFIG", tf_config(worker=[address]))
    with socket.create_server((host, int(port))):
        assert main(["serve"]) == 2
    assert f"cannot serve on {address}: port {port}: Address already in use" in capsys.readouterr().err


def test_a_number_of_devices_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    task = ["--job", "worker", "--index", "0", "--address", free_addresses(1)[0]]
    assert main(["serve", *task, "--devices", "0"]) == 2
    words = "The devices of a server must be an integer of at least 1, got 0."
    assert capsys.readouterr().err == f"coordinator serve: {words}\n"


def test_a_port_in_use_is_refused_for_health_too(capsys: pytest.CaptureFixture[str]) -> None:
    [address] = free_addresses(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "--job", "ps", "--index", "4", "--address", address, "--health-port", port]) == 2
    words = f"health on port {port}: Address already in use. Give it another --health-port."
    assert capsys.readouterr().err == f"coordinator serve: /job:ps/task:4 cannot report its {words}\n"


# How a server is ended, and its exit code.
ENDINGS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "SIGTERM": lambda server: server.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.send_signal(signal.SIGINT),
    "end of input": lambda server: server.stdin and server.stdin.close(),
}


def check_ending(ending: str, environment: Mapping[str, str]) -> None:
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


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_server_reports_that_it_serves_and_ends_with_code_0(environment: Environment, ending: str) -> None:
    check_ending(ending, environment)


@pytest.mark.cluster
@pytest.mark.long
def test_a_real_server_ends_with_code_0() -> None:
    check_ending("SIGTERM", os.environ)


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
