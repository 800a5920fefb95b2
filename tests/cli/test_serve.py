import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.local_servers import free_addresses
from coordinator.launch.serve import served_task
from tests.cli.conftest import Environment

TIMEOUT = 120.0


def tf_config(job: str = "worker", index: int = 0, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster or {"worker": ["b:2"]}, "task": {"type": job, "index": index}})


def test_the_evaluator_is_not_part_of_a_servers_cluster() -> None:
    text = tf_config("ps", worker=["b:2"], ps=["c:3"], evaluator=["d:4"])
    config = served_task({"TF_CONFIG": text}, job=None, index=None)
    assert config.name == "/job:ps/task:0"
    assert set(config.cluster) == {"worker", "ps"}


def test_options_override_the_task_in_tf_config() -> None:
    text = tf_config("chief", chief=["a:1"], worker=["b:2", "b:3"])
    assert served_task({"TF_CONFIG": text}, job="worker", index=1).address == "b:3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "TF_CONFIG is not set"),
        (" ", "TF_CONFIG is not set"),
        ("nonsense", "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG must be a JSON object"),
        (tf_config("worker", 3), "no task 3 in job 'worker'"),
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


# How a server is ended, and its exit code.
ENDINGS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "SIGTERM": lambda server: server.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.send_signal(signal.SIGINT),
    "end of input": lambda server: server.stdin and server.stdin.close(),
}


def check_ending(ending: str, environment: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "coordinator", "serve", "--exit-with-parent"],
        env={**environment, "TF_CONFIG": tf_config(worker=free_addresses(1))},
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


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_server_reports_that_it_serves_and_ends_with_code_0(environment: Environment, ending: str) -> None:
    check_ending(ending, environment)


@pytest.mark.cluster
@pytest.mark.long
def test_a_real_server_ends_with_code_0() -> None:
    check_ending("SIGTERM", os.environ)
