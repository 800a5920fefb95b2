"""Tests of `coordinator doctor` and `coordinator profile`."""

import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import sys

import pytest
import tensorflow as tf

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from coordinator.testing.status_server import CPU, StatusService, encoded_device
from tests.deadline import LIMIT


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_without_a_cluster_the_installation_and_the_machine_are_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^   tensorflow   2\.", printed, re.MULTILINE)
    assert re.search(r"^   machine      .*: \d+ CPUs, .* GiB memory available, \d+ GPUs$", printed, re.MULTILINE)
    assert "TF_CONFIG is not set" in printed
    assert printed.endswith("No problem found.\n")
    for version, words in (("2.19.1", "2.19.1 cannot be silenced"), ("2.21.0", "")):
        with monkeypatch.context() as patch:
            install(patch, version)
            assert main(["doctor"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("   versions ")]
        assert (len(lines), words in "".join(lines)) == (bool(words), True), version


def test_what_a_version_without_tests_lacks_is_found_by_another_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    interpreter = tmp_path / "python"
    install(monkeypatch, "2.99.0")
    monkeypatch.setattr(sys, "executable", str(interpreter))
    for ending, found in (
        ("exit 0", []),
        ("echo tensorflow lacks a name; echo note >&2", ["tensorflow lacks a name"]),
        (
            "(echo Traceback; echo ImportError) >&2; exit 1",
            ["coordinator cannot be loaded with it: ImportError"],
        ),
        ("exit 3", ["coordinator cannot be loaded with it: exit code 3"]),
    ):
        interpreter.write_text(f'#!/bin/sh\nprintf %s "$2" > {tmp_path}/program\n{ending}\n')
        interpreter.chmod(0o755)
        assert main(["doctor"]) == (1 if found else 0)
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "2.99.0 is newer than 2." in line]
        assert [line.removeprefix("!! versions     ") for line in lines if line.startswith("!!")] == found
    # What the other process runs finds nothing amiss in a tested version.
    runpy.run_path(str(tmp_path / "program"))
    assert capsys.readouterr().out == ""


def install(patch: pytest.MonkeyPatch, version: str) -> None:
    """Makes a version of TensorFlow the installed one, under any name of its distribution."""
    patch.setattr(
        importlib.metadata, "version", lambda name: version if name.startswith(("tensorflow", "tf")) else "3.15"
    )


def test_each_task_answers_in_some_time_or_it_is_said_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    chief, first, second, lost = free_addresses(4)
    cluster = {"chief": [chief], "worker": [first, lost], "ps": [second, "worker..no.such.host.invalid:80"]}
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
    assert re.search(r"!! ps 1 .* does not answer: ", printed)
    assert printed.endswith("3 problems found.\n")
    # Nothing answers any more.
    assert main(["profile", "--logdir", str(tmp_path)]) == 2
    assert f"{lost} is left out" in capsys.readouterr().out
    monkeypatch.delenv("TF_CONFIG")
    assert main(["profile", "--logdir", str(tmp_path), "--pid", str(os.getppid())]) == 2
    assert "has no TF_CONFIG. Give the addresses of servers, or --pid." in capsys.readouterr().err


@tf.function
def step() -> tf.Tensor:
    return tf.reduce_sum(tf.random.normal([50, 50]))


@pytest.mark.long
def test_the_profiles_of_all_servers_that_answer_are_one_run(
    strategy, shared_cluster, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [address for job in ("worker", "ps") for address in shared_cluster.spec[job]]
    dead = free_addresses(1, besides=servers)
    for _ in range(200):
        strategy.schedule(step)
    assert main(["profile", *servers, *dead, "--logdir", str(tmp_path), "--seconds", "0.5"]) == 1
    strategy.join(LIMIT)
    printed = capsys.readouterr().out
    assert f"{dead[0]} is left out, since it does not answer: the connection is refused" in printed
    assert f"{len(servers)} of {len(servers) + 1} servers were profiled for 0.5 s" in printed
    (run,) = (tmp_path / "plugins" / "profile").iterdir()
    assert len(list(run.glob("*.xplane.pb"))) == len(servers)
