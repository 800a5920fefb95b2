"""Tests of the task of a process, and of the environment that it is started in."""

import json
import os
import socket
from pathlib import Path

import pytest

import coordinator
from coordinator.errors import ClusterSpecError
from coordinator.launch.server_process import program_environment, server_environment
from coordinator.launch.task_config import TaskConfig

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["[::1]:4"]}


def text(**changes: object) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}} | changes)


def test_a_server_gets_its_own_task_alone_unless_arguments_name_another() -> None:
    config = TaskConfig.of_server(text())
    assert (config.job, config.index, config.name) == ("worker", 1, "/job:worker/task:1")
    assert (config.address, config.port) == ("c:3", 3)
    assert config.cluster == {"worker": {1: "c:3"}}
    assert TaskConfig.of_server(text(), job="ps", index=0).address == "[::1]:4"
    assert TaskConfig.of_server(text(), address="d:5").address == "d:5"
    assert TaskConfig.of_server("", job="worker", index=7, address="d:5").cluster == {"worker": {7: "d:5"}}


def test_the_text_is_written_for_other_processes() -> None:
    given = json.loads(TaskConfig(CLUSTER, "worker", 1).to_json())
    assert given == {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}
    sparse = TaskConfig({"worker": {1: "b:2", 5: "c:3"}}, "worker", 5)
    assert json.loads(sparse.to_json())["cluster"] == {"worker": {"1": "b:2", "5": "c:3"}}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "address"),
    [
        ({"worker": {"1": "b:2"}, "ps": ["c:3"]}, "worker", 1, "b:2"),
        ({"worker": {}, "ps": ["c:3"]}, "ps", 0, "c:3"),
        ({"worker": [], "ps": ["ps-0.ns:3"], "evaluator": ["d:4"], "master": ["e:5"], "": 7}, "ps", 0, "ps-0.ns:3"),
        ({"worker": ["b:2"], "ps": ["c:3"]}, "worker", "0", "b:2"),
        # The pod knows its own name, and that all of its job have one port.
        ({"worker": {}, "ps": ["ps-1.ns:3"]}, "ps", 1, f"{socket.gethostname()}:3"),
        ({"worker": ["w-0.ns:2", "w-1.ns:2"]}, "worker", 2, f"{socket.gethostname()}:2"),
    ],
)
def test_what_schedulers_write_is_taken(cluster: object, job: str, index: object, address: str) -> None:
    config = TaskConfig.of_server(text(cluster=cluster, task={"type": job, "index": index, "trial": "x"}))
    assert config.address == address


def test_a_task_outside_of_its_cluster_is_refused() -> None:
    for cluster, job, index, words in [
        ({}, "worker", 0, "'cluster' must name"),
        (["b:2"], "worker", 0, "'cluster' must name"),
        ({"": ["b:2"]}, "worker", 0, "name of a job"),
        ({"worker": []}, "worker", 0, "has no address"),
        (CLUSTER, "boss", 0, "no job 'boss' in the cluster: it has chief, ps, worker"),
        (CLUSTER, "worker", 2, "no task 2 in job 'worker': it has 0, 1"),
        (CLUSTER, "worker", True, "no task True in job 'worker'"),
    ]:
        with pytest.raises(ClusterSpecError, match=words):
            TaskConfig(cluster, job, index)


WRONG = {
    "{": "not JSON",
    "": "not JSON",
    "null": "must be a JSON object",
    text(task="worker"): "'task' must be an object",
    text(task={"type": "worker"}): "needs 'type' and 'index'",
    text(task={"type": "worker", "index": 2}): "no task 2 in job 'worker': its tasks are 0, 1. Give",
    text(task={"type": "worker", "index": True}): "must be an integer of at least 0, got True",
    text(task={"type": "boss", "index": 0}): "no task 0 in job 'boss': it has no address. Give",
    text(cluster={"worker": ["127.0.0.1:2"]}): "no task 1 in job 'worker': its tasks are 0",
    json.dumps({"task": {"type": "worker", "index": 0}}): "no task 0 in job 'worker': it has no address",
    text(cluster={"worker": "b:2"}): "must be a list of addresses",
    text(cluster={"worker": {"one": "b:2"}}): "index of job 'worker' must be an integer",
    text(cluster={"worker": ["b:1", "b"]}): "Task 1 of job 'worker' must be a 'host:port', with a port from 1 to 65535",
    **{text(cluster={"worker": ["b:1", each]}): "Task 1 of job 'worker'" for each in (":2", "b:x", "b:0", "b:65536")},
}


def test_errors_name_the_entry_to_change() -> None:
    for wrong, words in WRONG.items():
        with pytest.raises(ClusterSpecError, match=r"^TF_CONFIG") as raised:
            TaskConfig.of_server(wrong)
        assert words in str(raised.value)
    # An address that was given is not blamed on it.
    with pytest.raises(ClusterSpecError, match=r"^Task 0 of job 'worker' must be a 'host:port'"):
        TaskConfig.of_server("", job="worker", index=0, address="here")


def test_the_number_of_devices_of_a_server_is_in_its_task() -> None:
    config = TaskConfig({"worker": ["a:1"]}, "worker", 0, devices=2)
    assert TaskConfig.of_server(config.to_json()).devices == 2
    assert TaskConfig.of_server(config.to_json(), devices=3).devices == 3
    assert "devices" not in TaskConfig({"worker": ["a:1"]}, "worker", 0).to_json()
    for devices in (0, "2", True):
        with pytest.raises(ClusterSpecError, match="The devices of a server must be an integer"):
            TaskConfig.of_server(text(task={"type": "worker", "index": 0, "devices": devices}))


CHIEF, WORKER, PS = (TaskConfig(CLUSTER, job, 0) for job in ("chief", "worker", "ps"))
ROOT = str(Path(coordinator.__file__).parents[1])


def test_each_process_gets_the_gpus_the_path_and_the_token_that_are_for_it() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1", "COORDINATOR_DASHBOARD": "127.0.0.1:9100/token"}
    server, program = server_environment(inherited, WORKER), program_environment(inherited, CHIEF)
    # Parameter servers alone are kept from the GPU.
    assert server_environment(inherited, PS)["CUDA_VISIBLE_DEVICES"] == ""
    assert server["CUDA_VISIBLE_DEVICES"] == program["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in program_environment({}, CHIEF)
    assert program["COORDINATOR_DASHBOARD"] == "127.0.0.1:9100/token"
    assert "COORDINATOR_DASHBOARD" not in server
    for of in (program_environment, server_environment):
        assert of({}, WORKER)["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
        assert of({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, WORKER)["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
    # It imports the package that started it.
    assert server["PYTHONPATH"] == ROOT
    assert server_environment({"PYTHONPATH": "/a"}, WORKER)["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a"
