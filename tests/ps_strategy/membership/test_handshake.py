"""Tests of the handshake with servers, of its failures, and of which devices of a worker are used."""

import pytest
import tensorflow as tf

from coordinator.errors import DeviceMismatchError, VersionMismatchError
from coordinator.heartbeat.probes import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.clients import Client
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.handshake import Handshake, WorkerDevices, calling_device
from tests.ps_strategy.membership.fake_servers import ADDRESSES, FIRST, PS, SECOND

CLIENT = Client(5, "client:1", "host")


def run(incarnation: int) -> Connection:
    return Connection(incarnation, number=incarnation, since=0.0, calling_device="/device:CPU:0")


class Servers:
    """Replaces the functions that call servers.

    Attributes:
      registered: the addresses of the servers where this client registered.
      errors: what the handshake with a server raises, by address.
      is_error: whether another version was to be an error the last time.
    """

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.is_error: bool | None = None

    def check_version(self, device: str, address: str, *, is_error: bool) -> None:
        self.is_error = is_error
        if address in self.errors:
            raise self.errors[address]

    def register(self, own: Client, device: str, address: str, timeout: float) -> None:
        assert own is CLIENT
        self.registered.append(address)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(handshake, "check_version", servers.check_version)
    monkeypatch.setattr(handshake, "register", servers.register)
    return servers


def test_new_servers_make_a_handshake(servers) -> None:
    handshakes, connected = Handshake(CLIENT, Options()), {task: run(1) for task in ADDRESSES}
    assert handshakes.admit(connected, ADDRESSES) == connected
    assert sorted(servers.registered) == sorted(ADDRESSES.values())
    assert not handshakes.refused
    assert servers.is_error is True
    Handshake(CLIENT, Options(version_mismatch="warn")).admit({FIRST: run(1)}, ADDRESSES)
    assert servers.is_error is False


def test_a_server_of_another_version_is_refused(servers, caplog) -> None:
    handshakes = Handshake(CLIENT, Options())
    servers.errors["second:1"] = VersionMismatchError("It runs another TensorFlow.")
    assert set(handshakes.admit({FIRST: run(1), SECOND: run(2)}, ADDRESSES)) == {FIRST}
    assert "It runs another TensorFlow. It takes no part." in caplog.text
    assert handshakes.refused == {2: servers.errors["second:1"]}


@pytest.mark.parametrize("error", [tf.errors.UnavailableError(None, None, "Socket closed"), TimeoutError("30 s")])
def test_a_server_that_dies_or_is_silent_during_its_handshake_may_return(servers, error) -> None:
    handshakes = Handshake(CLIENT, Options())
    servers.errors["first:1"] = error
    assert handshakes.admit({FIRST: run(1)}, ADDRESSES) == {}
    assert not handshakes.refused
    del servers.errors["first:1"]
    assert set(handshakes.admit({FIRST: run(2)}, ADDRESSES)) == {FIRST}


def test_a_worker_with_other_devices_than_the_first_one_is_refused_once(caplog) -> None:
    handshakes = Handshake(CLIENT, Options())
    one, two = (tuple(f"/job:worker/replica:0/task:0/device:CPU:{n}" for n in range(count)) for count in (1, 2))
    statuses = {PS: TaskStatus(1, one), SECOND: TaskStatus(2, one), FIRST: TaskStatus(3, two)}
    for _ in range(2):
        handshakes.check_devices(statuses, ADDRESSES)
    assert [type(error) for error in handshakes.refused.values()] == [DeviceMismatchError]
    assert str(handshakes.refused[2]).startswith(
        "/job:worker/task:1 (second:1) has 1 CPU device, and the other workers"
    )
    assert len(caplog.records) == 1
    # It was started again, with as many.
    handshakes.check_devices({SECOND: TaskStatus(4, two)}, ADDRESSES)
    assert 4 not in handshakes.refused


@pytest.mark.parametrize(
    ("names", "replicas", "caller"),
    [
        (["CPU:0", "XLA_GPU:0"], ["CPU:0"], "CPU:0"),
        (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1"], "CPU:0"),
        (["CPU:0", "CPU:1", "GPU:0"], ["CPU:0"], "GPU:0"),
        (["CPU:0", "GPU:1", "GPU:0"], ["GPU:0", "GPU:1"], "GPU:0"),
    ],
)
def test_several_gpus_are_replicas_or_else_the_cpus_and_the_first_gpu_is_called(names, replicas, caller) -> None:
    devices = [f"/job:worker/replica:0/task:3/device:{name}" for name in names]
    assert sorted(WorkerDevices.of(devices).names) == [f"/device:{name}" for name in replicas]
    assert calling_device(devices) == f"/device:{caller}"
