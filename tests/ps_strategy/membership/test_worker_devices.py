"""Which devices of a worker are replicas."""

import pytest

from coordinator.ps_strategy.membership.handshake import WorkerDevices, calling_device

TASK = "/job:worker/replica:0/task:3"


@pytest.mark.parametrize(
    ("names", "replicas"),
    [
        (["CPU:0"], ["/device:CPU:0"]),
        (["CPU:0", "CPU:1"], ["/device:CPU:0", "/device:CPU:1"]),
        (["CPU:0", "GPU:0"], ["/device:CPU:0"]),
        (["CPU:0", "CPU:1", "GPU:0"], ["/device:CPU:0"]),
        (["CPU:0", "GPU:0", "GPU:1"], ["/device:GPU:0", "/device:GPU:1"]),
        (["CPU:0", "XLA_CPU:0"], ["/device:CPU:0"]),
    ],
)
def test_several_gpus_are_replicas_or_else_the_cpus(names: list[str], replicas: list[str]) -> None:
    devices = WorkerDevices.of([f"{TASK}/device:{name}" for name in names])
    assert list(devices.names) == replicas


def test_a_number_of_devices_is_named() -> None:
    assert [str(WorkerDevices("CPU", 1)), str(WorkerDevices("GPU", 2))] == ["1 CPU device", "2 GPU devices"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["CPU:0"], "/device:CPU:0"),
        (["CPU:0", "CPU:1"], "/device:CPU:0"),
        (["CPU:0", "XLA_GPU:0"], "/device:CPU:0"),
        (["CPU:0", "GPU:0"], "/device:GPU:0"),
        (["CPU:0", "GPU:1", "GPU:0"], "/device:GPU:0"),
    ],
)
def test_functions_are_called_on_the_first_gpu_if_there_is_one(names: list[str], expected: str) -> None:
    assert calling_device([f"{TASK}/device:{name}" for name in names]) == expected
