"""Tests of the handshake with servers, and of its failures."""

import pytest
import tensorflow as tf

from coordinator.errors import DeviceMismatchError, VersionMismatchError
from coordinator.heartbeat.probes import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.clients import Client
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.handshake import Handshake

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}
CLIENT = Client(5, "client:1", "host")


def run(incarnation: int) -> Connection:
    return Connection(incarnation, number=incarnation, since=0.0, calling_device="/device:CPU:0")


class Servers:
    """Replaces the functions that call servers.

    Attributes:
      registered: the addresses of the servers where this client registered.
      errors: what the handshake with a server raises, by address.
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


@pytest.fixture
def handshakes(servers) -> Handshake:
    return Handshake(CLIENT, Options())


def test_new_servers_make_a_handshake(servers, handshakes) -> None:
    connected = {task: run(1) for task in ADDRESSES}
    assert handshakes.admit(connected, ADDRESSES) == connected
    assert sorted(servers.registered) == sorted(ADDRESSES.values())
    assert servers.is_error is True


def test_a_server_of_another_version_is_refused(servers, handshakes, caplog) -> None:
    servers.errors["second:1"] = VersionMismatchError("It runs another TensorFlow.")
    assert set(handshakes.admit({FIRST: run(1), SECOND: run(2)}, ADDRESSES)) == {FIRST}
    assert "It runs another TensorFlow. It takes no part." in caplog.text
    assert handshakes.refused == {2: servers.errors["second:1"]}


def test_no_server_is_refused_at_first(handshakes) -> None:
    assert not handshakes.refused


def test_a_server_that_dies_during_its_handshake_may_return(servers, handshakes) -> None:
    servers.errors["first:1"] = tf.errors.UnavailableError(None, None, "Socket closed")
    assert handshakes.admit({FIRST: run(1)}, ADDRESSES) == {}
    assert not handshakes.refused
    del servers.errors["first:1"]
    assert set(handshakes.admit({FIRST: run(2)}, ADDRESSES)) == {FIRST}


def test_another_version_may_be_a_warning(servers) -> None:
    handshakes = Handshake(CLIENT, Options(version_mismatch="warn"))
    handshakes.admit({FIRST: run(1)}, ADDRESSES)
    assert servers.is_error is False


def test_a_server_that_does_not_answer_its_handshake_may_return(servers, handshakes) -> None:
    servers.errors["first:1"] = TimeoutError("A call into TensorFlow has not returned in 30 s.")
    assert handshakes.admit({FIRST: run(1)}, ADDRESSES) == {}
    assert not handshakes.refused
    del servers.errors["first:1"]
    assert set(handshakes.admit({FIRST: run(1)}, ADDRESSES)) == {FIRST}


def test_a_worker_with_other_devices_than_the_first_one_is_refused_once(servers, caplog):
    handshake = Handshake(CLIENT, Options())
    one, two = (tuple(f"/job:worker/replica:0/task:0/device:CPU:{n}" for n in range(count)) for count in (1, 2))
    statuses = {PS: TaskStatus(1, one), SECOND: TaskStatus(2, one), FIRST: TaskStatus(3, two)}
    for _ in range(2):
        handshake.check_devices(statuses, ADDRESSES)
    assert [type(error) for error in handshake.refused.values()] == [DeviceMismatchError]
    assert str(handshake.refused[2]).startswith("/job:worker/task:1 (second:1) has 1 CPU device, and the other workers")
    assert len(caplog.records) == 1
    # It was started again, with as many.
    handshake.check_devices({SECOND: TaskStatus(4, two)}, ADDRESSES)
    assert 4 not in handshake.refused
