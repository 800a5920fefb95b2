import json
import os
import pathlib

import pytest
import tensorflow as tf

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests.deadline import LIMIT


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


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


def test_the_cluster_is_that_of_the_environment_or_of_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    chief, worker, server = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    assert main(["profile", "--logdir", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert f"{worker} is left out" in printed.out
    assert f"{server} is left out" in printed.out
    assert printed.err == "coordinator profile: No server answers. Is the training still running?\n"
    monkeypatch.delenv("TF_CONFIG")
    assert main(["profile", "--logdir", str(tmp_path), "--pid", str(os.getppid())]) == 2
    assert "has no TF_CONFIG. Give the addresses of servers, or --pid." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "There is no cluster to profile: TF_CONFIG is not set."),
        (["--seconds", "0"], "--seconds must be a number above 0 and at most 60, got 0.0."),
        (["--pid", "1", "a:1"], "--pid cannot be given beside addresses."),
        (["--pid", "999999999"], "The environment of the process 999999999 cannot be read"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--logdir", "logs", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"coordinator profile: {words}")
