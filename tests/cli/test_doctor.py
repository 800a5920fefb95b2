import importlib.metadata
import json
import re

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from coordinator.testing.status_server import CPU, StatusService, encoded_device


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_without_a_cluster_the_installation_and_the_machine_are_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^   tensorflow   2\.", printed, re.MULTILINE)
    assert re.search(r"^   machine      .*: \d+ CPUs, .* GiB memory available, \d+ GPUs$", printed, re.MULTILINE)
    assert "servers on localhost can be closed to other machines" in printed
    assert "TF_CONFIG is not set" in printed
    assert printed.endswith("No problem found.\n")


@pytest.mark.parametrize(
    ("tensorflow", "words"),
    [("2.19.1", "2.19.1 cannot be silenced"), ("2.99.0", "2.99.0 is newer than 2."), ("2.21.0", "")],
)
def test_the_features_that_are_off_and_unknown_versions_are_listed(
    tensorflow: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: tensorflow if name == "tensorflow" else "3.15")
    assert main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("   versions ")]
    assert len(lines) == bool(words)
    assert words in "".join(lines)


def test_each_task_answers_in_some_time_or_it_is_said_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chief, first, second, lost = free_addresses(4)
    cluster = {"chief": [chief], "worker": [first, lost], "ps": [second, "there.is.no.such.host.invalid:80"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))

    def reply() -> bytes:
        return encoded_device(CPU, 7)

    with StatusService(first, reply), StatusService(second, reply):
        assert main(["doctor", "--timeout", "10"]) == 1
    printed = capsys.readouterr().out
    assert f"   this task    /job:chief/task:0 at {chief}; its port is free" in printed
    assert re.search(
        rf"   worker 0     {first} \(127\.0\.0\.1\) answers in [0-9.]+ ms, .*; at first [0-9.]+ ms; CPU:0\n", printed
    )
    assert f"!! worker 1     {lost} does not answer: the connection is refused" in printed
    assert f"!! ps 0         {second} is another task, with the devices {CPU}" in printed
    assert re.search(r"!! ps 1 .* does not answer: the host name does not resolve", printed)
    assert printed.endswith("3 problems found.\n")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{", [], "TF_CONFIG is not JSON"),
        ('{"cluster": {"worker": ["a:1"]}}', [], "TF_CONFIG's 'task' must be an object with 'type' and 'index'"),
        ('{"cluster": {}, "task": {"type": "chief", "index": 0}}', [], "TF_CONFIG: 'cluster' must name"),
        ("", ["--timeout", "0"], "--timeout must be a number of seconds above 0, got 0.0."),
    ],
)
def test_what_cannot_be_examined_is_refused_in_one_line(
    text: str, options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert main(["doctor", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"coordinator doctor: {words}")
