"""Which servers take part: each new incarnation makes one handshake, and what may go wrong in it."""

import pytest
import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.options import Options
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.handshake import Handshake

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}


def run(incarnation: int) -> Connection:
    return Connection(incarnation, number=incarnation, since=0.0)


class Servers:
    """Takes the place of the functions that talk to servers.

    Attributes:
      registered: the addresses of the servers where this client registered.
      troubles: what the handshake with a server raises, by address.
      held: the addresses that the lease has now.
    """

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.troubles: dict[str, Exception] = {}
        self.held: set[str] = set()
        self.is_error: bool | None = None

    def check_version(self, device: str, address: str, *, is_error: bool) -> None:
        self.is_error = is_error
        if address in self.troubles:
            raise self.troubles[address]

    def register(self, device: str, address: str) -> None:
        self.registered.append(address)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(handshake, "context_id", lambda: 5)
    monkeypatch.setattr(handshake, "check_version", servers.check_version)
    monkeypatch.setattr(handshake.ClientRegistry, "register", lambda _, *server: servers.register(*server))
    monkeypatch.setattr(handshake.ClientLease, "hold", lambda self, held: setattr(servers, "held", set(held)))
    return servers


@pytest.fixture
def handshakes(servers):
    handshakes = Handshake("client:1", Options())
    yield handshakes
    handshakes.close()


def test_new_servers_make_a_handshake_and_are_held(servers, handshakes) -> None:
    connected = {task: run(1) for task in ADDRESSES}
    assert handshakes.admit(connected, ADDRESSES) == connected
    assert sorted(servers.registered) == sorted(ADDRESSES.values())
    assert servers.held == set(ADDRESSES.values())
    assert servers.is_error is True


def test_an_incarnation_makes_one_handshake_and_another_one_again(servers, handshakes) -> None:
    first, second = run(1), run(2)
    handshakes.admit({FIRST: first, SECOND: first}, ADDRESSES)
    servers.registered.clear()
    handshakes.admit({FIRST: first, SECOND: second}, ADDRESSES)
    assert servers.registered == ["second:1"]


def test_a_server_that_is_no_longer_connected_is_not_held(servers, handshakes) -> None:
    first = run(1)
    handshakes.admit({FIRST: first, SECOND: first}, ADDRESSES)
    assert handshakes.admit({FIRST: first}, ADDRESSES) == {FIRST: first}
    assert servers.held == {"first:1"}


def test_a_server_of_another_version_takes_no_part(servers, handshakes, caplog) -> None:
    servers.troubles["second:1"] = VersionMismatchError("It runs another TensorFlow.")
    assert set(handshakes.admit({FIRST: run(1), SECOND: run(2)}, ADDRESSES)) == {FIRST}
    assert servers.held == {"first:1"}
    assert "It runs another TensorFlow. It takes no part." in caplog.text
    assert handshakes.is_refused(2)
    assert not handshakes.is_refused(1)
    with pytest.raises(VersionMismatchError, match="another TensorFlow"):
        handshakes.raise_refusal()


def test_no_server_is_refused_at_first(handshakes) -> None:
    handshakes.raise_refusal()


def test_a_server_that_dies_during_its_handshake_may_return(servers, handshakes) -> None:
    servers.troubles["first:1"] = tf.errors.UnavailableError(None, None, "Socket closed")
    assert handshakes.admit({FIRST: run(1)}, ADDRESSES) == {}
    handshakes.raise_refusal()
    assert not handshakes.is_refused(1)
    del servers.troubles["first:1"]
    assert set(handshakes.admit({FIRST: run(2)}, ADDRESSES)) == {FIRST}


def test_another_version_may_be_a_warning(servers) -> None:
    handshakes = Handshake("client:1", Options(version_mismatch="warn"))
    handshakes.admit({FIRST: run(1)}, ADDRESSES)
    assert servers.is_error is False
    handshakes.close()


def test_a_server_that_does_not_answer_its_handshake_may_return(servers, handshakes) -> None:
    servers.troubles["first:1"] = TimeoutError("A call into TensorFlow has not returned in 30 s.")
    assert handshakes.admit({FIRST: run(1)}, ADDRESSES) == {}
    assert not handshakes.is_refused(1)
    del servers.troubles["first:1"]
    assert set(handshakes.admit({FIRST: run(1)}, ADDRESSES)) == {FIRST}
