"""A note of who was there; nothing is freed of a client that may live."""

import socket

import pytest
import tensorflow as tf

from coordinator.ps_strategy import client_note, tensorflow_internals
from coordinator.ps_strategy.client_note import Client, is_gone, leave_note, read_note, write_note
from coordinator.ps_strategy.server_context import Answer

OWN = Client.of_this_process(7, "localhost:1")


def test_what_is_written_is_read() -> None:
    clients = [Client(2**63 + 1, "10.0.0.1:2222", "here"), Client(5, "localhost:1", "there")]
    assert read_note(write_note(clients)) == clients


@pytest.mark.parametrize("text", [b"", b"{", b"5", b'["x"]', b'[{"context_id": 1}]', b"\xff"])
def test_a_note_that_is_not_readable_names_nobody(text: bytes) -> None:
    assert read_note(text) == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(Answer.HELD, False), (Answer.SILENT, False), (Answer.UNKNOWN, True), (Answer.UNREACHED, True)],
)
def test_a_client_is_gone_only_if_that_is_sure(monkeypatch, answer: Answer, expected: bool) -> None:
    asked = []

    def renew(self, timeout):
        asked.append(self._address)
        return answer

    monkeypatch.setattr(client_note.ServerContext, "renew", renew)
    assert is_gone(Client(1, "10.0.0.1:2222", "elsewhere"), OWN, 1.0) is expected
    assert asked == ["10.0.0.1:2222"]


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1"])
def test_a_loopback_address_of_another_machine_says_nothing(address: str) -> None:
    assert not is_gone(Client(1, address, "not " + socket.gethostname()), OWN, 1.0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_nobody_at_its_address_means_that_a_client_is_gone(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        frozen = Client(1, f"{host}:{port}", socket.gethostname())
        assert not is_gone(frozen, OWN, 0.3), "somebody is there, who does not answer"
    assert is_gone(frozen, OWN, 10.0)


PS = "/job:ps/replica:0/task:0"


@pytest.fixture
def ps_address(shared_cluster) -> str:
    return shared_cluster.spec["ps"][0]


@pytest.fixture
def own(strategy) -> Client:
    """The client that this process is."""
    server = tensorflow_internals.current_server_def()
    [address] = [job.tasks[0] for job in server.cluster.job if job.name == "chief"]
    return Client.of_this_process(tensorflow_internals.context_id(), address)


def note_on_server() -> list[Client]:
    with tf.device(f"{PS}/device:CPU:0"):
        note = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name="coordinator/clients")
        return read_note(tf.raw_ops.ReadVariableOp(resource=note, dtype=tf.string).numpy())


def test_this_client_is_named_on_its_servers_and_lives(own) -> None:
    assert own in note_on_server()
    assert not is_gone(own, OWN, 10.0)
    another = Client(own.context_id ^ 1, own.address, own.host)
    assert is_gone(another, OWN, 10.0), "another process, or an earlier one, that had this address"


def test_the_note_keeps_who_lives_and_drops_who_is_gone(own, ps_address, monkeypatch) -> None:
    silent, gone = Client(1, "10.0.0.1:1", "elsewhere"), Client(2, "10.0.0.2:1", "elsewhere")
    before = note_on_server()
    released = []
    monkeypatch.setattr(client_note, "read_note", lambda text: [silent, gone, *before])
    monkeypatch.setattr(client_note, "is_gone", lambda client, own, timeout: client == gone)
    monkeypatch.setattr(client_note, "_release", lambda client, *_: released.append(client))
    leave_note(PS, ps_address, own, 10.0)
    assert released == [gone]
    assert set(note_on_server()) == {own, silent, *before}
    monkeypatch.undo()
    with tf.device(f"{PS}/device:CPU:0"):
        note = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name="coordinator/clients")
        tf.raw_ops.AssignVariableOp(resource=note, value=tf.constant(b"no note"))
    leave_note(PS, ps_address, own, 10.0)
    assert note_on_server() == [own], "begun anew"
