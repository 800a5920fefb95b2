"""Tests of the list of clients on each server; the resources of a client that may be running are not freed."""

import socket

import pytest
import tensorflow as tf

from coordinator.ps_strategy.membership import clients
from coordinator.ps_strategy.membership.clients import (
    Answer,
    Client,
    decode_clients,
    encode_clients,
    has_ended,
    register,
)
from coordinator.ps_strategy.tensorflow_internals.process import context_id, current_server_def

TIMEOUT = 10.0


def test_a_written_list_is_read() -> None:
    clients = [Client(2**63 + 1, "10.0.0.1:2222", "here"), Client(5, "localhost:1", "there")]
    assert decode_clients(encode_clients(clients)) == clients


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"5", b'["x"]', b'[{"context_id": 1}]', b'[{"context_id": 1, "address": "localhost:1"}]', b"\xff"],
)
def test_an_unreadable_list_has_no_clients(text: bytes) -> None:
    assert decode_clients(text) == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(Answer.HELD, False), (Answer.SILENT, False), (Answer.UNKNOWN, True), (Answer.UNREACHED, True)],
)
def test_a_client_counts_as_ended_only_if_that_is_certain(monkeypatch, answer: Answer, expected: bool) -> None:
    renewed = []

    def renew(self, timeout):
        renewed.append(self._address)
        return answer

    monkeypatch.setattr(clients.RemoteContext, "renew", renew)
    assert has_ended(Client(1, "10.0.0.1:2222", "elsewhere"), TIMEOUT) is expected
    assert renewed == ["10.0.0.1:2222"]


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1"])
def test_a_loopback_address_of_another_machine_proves_nothing(address: str) -> None:
    assert not has_ended(Client(1, address, "not " + socket.gethostname()), TIMEOUT)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_no_process_at_its_address_means_that_a_client_has_ended(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        frozen = Client(1, f"{host}:{port}", socket.gethostname())
        assert not has_ended(frozen, 0.3), "a process that does not answer"
    assert has_ended(frozen, TIMEOUT)


PS = "/job:ps/replica:0/task:0"


@pytest.fixture
def ps_address(shared_cluster) -> str:
    return shared_cluster.spec["ps"][0]


@pytest.fixture
def own(strategy) -> Client:
    """The client of this process."""
    server = current_server_def()
    [address] = [job.tasks[0] for job in server.cluster.job if job.name == "chief"]
    return Client(context_id(), address, socket.gethostname())


def clients_on_server() -> list[Client]:
    with tf.device(f"{PS}/device:CPU:0"):
        entry = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name="coordinator/clients")
        return decode_clients(tf.raw_ops.ReadVariableOp(resource=entry, dtype=tf.string).numpy())


def test_this_client_is_registered_on_its_servers_and_counts_as_running(own) -> None:
    assert own in clients_on_server()
    assert not has_ended(own, TIMEOUT)
    another = Client(own.context_id ^ 1, own.address, own.host)
    assert has_ended(another, TIMEOUT), "another process, or an earlier one, that had this address"


def test_a_list_keeps_running_clients_and_drops_ended_ones(own, ps_address, monkeypatch) -> None:
    silent, gone = Client(1, "10.0.0.1:1", "elsewhere"), Client(2, "10.0.0.2:1", "elsewhere")
    before = clients_on_server()
    released = []

    def release(self, timeout):
        released.append((self._address, self._context_id))
        return Answer.HELD

    monkeypatch.setattr(clients, "decode_clients", lambda text: [silent, gone, *before])
    monkeypatch.setattr(clients, "has_ended", lambda client, timeout: client == gone)
    monkeypatch.setattr(clients.RemoteContext, "release", release)
    register(own, PS, ps_address, TIMEOUT)
    assert released == [(ps_address, gone.context_id)]
    assert set(clients_on_server()) == {own, silent, *before}
    monkeypatch.undo()
    with tf.device(f"{PS}/device:CPU:0"):
        entry = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name="coordinator/clients")
        tf.raw_ops.AssignVariableOp(resource=entry, value=tf.constant(b"not a list"))
    register(own, PS, ps_address, TIMEOUT)
    assert clients_on_server() == [own], "replaced"
