import json

import pytest

from coordinator.errors import ClusterSpecError
from coordinator.launch.task_config import TaskConfig

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["[::1]:4"]}


def text(**changes: object) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}} | changes)


def test_the_task_is_parsed() -> None:
    config = TaskConfig.from_json(text())
    assert (config.job, config.index, config.name) == ("worker", 1, "/job:worker/task:1")
    assert (config.address, config.port) == ("c:3", 3)
    assert config.cluster["ps"] == {0: "[::1]:4"}


def test_job_and_index_arguments_override_the_task() -> None:
    assert TaskConfig.from_json(text(), job="ps", index=0).address == "[::1]:4"
    assert TaskConfig.from_json(text(task={}), job="worker", index=0).address == "b:2"


def test_a_written_config_can_be_read() -> None:
    config = TaskConfig.from_json(text())
    assert TaskConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json()) == {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


def test_indices_may_be_missing() -> None:
    config = TaskConfig.from_json(text(cluster={"worker": {"1": "b:2", "5": "c:3"}}))
    assert config.address == "b:2"
    assert json.loads(config.to_json())["cluster"] == {"worker": {"1": "b:2", "5": "c:3"}}


def test_a_job_can_be_left_out() -> None:
    assert set(TaskConfig.from_json(text()).without("chief").cluster) == {"worker", "ps"}
    assert set(TaskConfig.from_json(text()).without("evaluator").cluster) == {"chief", "worker", "ps"}


def test_a_config_is_frozen() -> None:
    cluster = {"worker": ["b:2"]}
    config = TaskConfig(cluster, "worker", 0)
    cluster["worker"].append("c:3")
    assert config.cluster == {"worker": {0: "b:2"}}
    with pytest.raises(TypeError):
        config.cluster["ps"] = {0: "d:4"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        (text(task="worker"), "'task' must be an object"),
        (text(task={"type": "worker"}), "needs 'type' and 'index'"),
        (text(task={"index": 0}), "needs 'type' and 'index'"),
        (text(task={"type": "worker", "index": 2}), "no task 2 in job 'worker': it has 0, 1"),
        (text(task={"type": "worker", "index": "1"}), "no task '1' in job 'worker'"),
        (text(task={"type": "worker", "index": True}), "no task True in job 'worker'"),
        (text(task={"type": "boss", "index": 0}), "no job 'boss' in the cluster: it has chief, ps, worker"),
        (text(task={"type": ["worker"], "index": 0}), "no job"),
        (json.dumps({"task": {"type": "worker", "index": 0}}), "'cluster' must name"),
        (text(cluster=None), "'cluster' must name"),
        (text(cluster=["b:2"]), "'cluster' must name"),
        (text(cluster={}), "'cluster' must name"),
        (text(cluster={"": ["b:2"]}), "name of a job"),
        (text(cluster={"worker": "b:2"}), "must be a list of addresses"),
        (text(cluster={"worker": []}), "has no address"),
        (text(cluster={"worker": {"one": "b:2"}}), "index of job 'worker' must be an integer"),
        (
            text(cluster={"worker": ["b:1", "b"]}),
            "Task 1 of job 'worker' must be a 'host:port', with a port from 1 to 65535, got 'b'",
        ),
        (text(cluster={"worker": ["b:1", ":2"]}), "Task 1 of job 'worker'"),
        (text(cluster={"worker": ["b:1", "b:x"]}), "Task 1 of job 'worker'"),
        (text(cluster={"worker": ["b:1", "b:0"]}), "Task 1 of job 'worker'"),
        (text(cluster={"worker": ["b:1", "b:65536"]}), "Task 1 of job 'worker'"),
        (text(cluster={"worker": ["b:1", 2]}), "Task 1 of job 'worker'"),
    ],
)
def test_errors_name_the_entry_to_change(wrong: str, words: str) -> None:
    with pytest.raises(ClusterSpecError, match=r"^TF_CONFIG") as raised:
        TaskConfig.from_json(wrong)
    assert words in str(raised.value)
