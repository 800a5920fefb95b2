import os
from pathlib import Path

import coordinator
from coordinator.launch.server_process import program_environment, server_environment
from coordinator.launch.task_config import TaskConfig

CLUSTER = {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}
CHIEF, WORKER, PS = (TaskConfig(CLUSTER, job, 0) for job in CLUSTER)
ROOT = str(Path(coordinator.__file__).parents[1])


def test_only_parameter_servers_are_kept_from_the_gpu() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert server_environment(inherited, PS)["CUDA_VISIBLE_DEVICES"] == ""
    assert server_environment(inherited, WORKER)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert program_environment(inherited, CHIEF)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in program_environment({}, CHIEF)


def test_a_process_takes_memory_of_a_gpu_as_it_needs_it_unless_told_otherwise():
    for of in (program_environment, server_environment):
        assert of({}, WORKER)["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
        assert of({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, WORKER)["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"


def test_a_server_imports_the_package_that_started_it() -> None:
    assert server_environment({}, WORKER)["PYTHONPATH"] == ROOT
    assert server_environment({"PYTHONPATH": "/a"}, WORKER)["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a"


def test_no_server_gets_the_token_of_the_dashboard() -> None:
    inherited = {"COORDINATOR_DASHBOARD": "127.0.0.1:9100/token"}
    assert program_environment(inherited, CHIEF)["COORDINATOR_DASHBOARD"] == "127.0.0.1:9100/token"
    assert "COORDINATOR_DASHBOARD" not in server_environment(inherited, WORKER)
