import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from coordinator.launch.command_line import main
from coordinator.launch.free_addresses import free_addresses
from coordinator.launch.serve import served_task

TIMEOUT = 120.0


def tf_config(job: str = "worker", index: int = 0, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster or {"worker": ["b:2"]}, "task": {"type": job, "index": index}})


def test_the_evaluator_is_not_part_of_a_servers_cluster() -> None:
    text = tf_config("ps", worker=["b:2"], ps=["c:3"], evaluator=["d:4"])
    config = served_task({"TF_CONFIG": text}, job=None, index=None)
    assert config.name == "/job:ps/task:0"
    assert set(config.cluster) == {"worker", "ps"}


def test_options_go_before_the_task_in_tf_config() -> None:
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
def test_what_cannot_work_is_refused_in_one_line(
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


# How a server is told to end, and the exit code that follows.
ENDINGS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "SIGTERM": lambda server: server.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.send_signal(signal.SIGINT),
    "end of input": lambda server: server.stdin and server.stdin.close(),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Real servers, one for each way to end; they start together, as each takes some seconds to load TensorFlow."""
    servers = {}
    for ending, address in zip(ENDINGS, free_addresses(len(ENDINGS)), strict=True):
        servers[ending] = subprocess.Popen(
            [sys.executable, "-m", "coordinator", "serve", "--exit-with-parent"],
            env={**os.environ, "TF_CONFIG": tf_config(worker=[address])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    yield servers
    for server in servers.values():
        with server:
            server.kill()


@pytest.mark.cluster
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_server_says_when_it_serves_and_ends_well_when_told_to(
    servers: dict[str, subprocess.Popen[str]], ending: str
) -> None:
    server = servers[ending]
    assert server.stdout is not None
    assert server.stdout.readline().startswith("coordinator: /job:worker/task:0 serves on 127.0.0.1:")
    ENDINGS[ending](server)
    assert server.wait(TIMEOUT) == 0
    assert server.stdout.read() == ""
