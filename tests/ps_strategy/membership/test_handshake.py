"""Who takes part: every new run of a server is greeted once, in a table of what may go wrong."""

from dataclasses import dataclass

import pytest
import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.options import Options
from coordinator.ps_strategy import server_admission, tensorflow_internals
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.server_admission import ServerAdmission

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}


@dataclass(frozen=True)
class Run:
    incarnation: int


class Servers:
    """Greets in place of the real functions.

    Attributes:
      greeted: the addresses of the servers that got a note.
      troubles: what greeting a server raises, by address.
      held: the addresses that the lease was last told of.
    """

    def __init__(self) -> None:
        self.greeted: list[str] = []
        self.troubles: dict[str, Exception] = {}
        self.held: set[str] = set()
        self.is_error: bool | None = None

    def check_version(self, device: str, address: str, *, is_error: bool) -> None:
        self.is_error = is_error
        if address in self.troubles:
            raise self.troubles[address]

    def leave_note(self, device: str, address: str, own, timeout: float) -> None:
        self.greeted.append(address)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(tensorflow_internals, "context_id", lambda: 5)
    monkeypatch.setattr(server_admission, "check_version", servers.check_version)
    monkeypatch.setattr(server_admission, "leave_note", servers.leave_note)
    monkeypatch.setattr(server_admission.ClientLease, "hold", lambda self, held: setattr(servers, "held", set(held)))
    return servers


@pytest.fixture
def admission(servers):
    admission = ServerAdmission("client:1", Options())
    yield admission
    admission.close()


def test_new_servers_are_greeted_and_held(servers, admission) -> None:
    connected = {task: Run(1) for task in ADDRESSES}
    assert admission.admit(connected, ADDRESSES) == connected
    assert sorted(servers.greeted) == sorted(ADDRESSES.values())
    assert servers.held == set(ADDRESSES.values())
    assert servers.is_error is True


def test_a_run_is_greeted_once_and_another_run_again(servers, admission) -> None:
    first, second = Run(1), Run(2)
    admission.admit({FIRST: first, SECOND: first}, ADDRESSES)
    servers.greeted.clear()
    admission.admit({FIRST: first, SECOND: second}, ADDRESSES)
    assert servers.greeted == ["second:1"]


def test_a_server_that_is_no_longer_connected_is_not_held(servers, admission) -> None:
    run = Run(1)
    admission.admit({FIRST: run, SECOND: run}, ADDRESSES)
    assert admission.admit({FIRST: run}, ADDRESSES) == {FIRST: run}
    assert servers.held == {"first:1"}


def test_a_server_of_another_version_takes_no_part(servers, admission, caplog) -> None:
    servers.troubles["second:1"] = VersionMismatchError("It runs another TensorFlow.")
    assert set(admission.admit({FIRST: Run(1), SECOND: Run(2)}, ADDRESSES)) == {FIRST}
    assert servers.held == {"first:1"}
    assert "It runs another TensorFlow. It takes no part." in caplog.text
    assert admission.is_refused(2)
    assert not admission.is_refused(1)
    with pytest.raises(VersionMismatchError, match="another TensorFlow"):
        admission.raise_refusal()


def test_nobody_is_refused_at_first(admission) -> None:
    admission.raise_refusal()


def test_a_server_that_dies_while_it_is_greeted_may_come_again(servers, admission) -> None:
    servers.troubles["first:1"] = tf.errors.UnavailableError(None, None, "Socket closed")
    assert admission.admit({FIRST: Run(1)}, ADDRESSES) == {}
    admission.raise_refusal()
    assert not admission.is_refused(1)
    del servers.troubles["first:1"]
    assert set(admission.admit({FIRST: Run(2)}, ADDRESSES)) == {FIRST}


def test_a_warning_may_do(servers) -> None:
    admission = ServerAdmission("client:1", Options(version_mismatch="warn"))
    admission.admit({FIRST: Run(1)}, ADDRESSES)
    assert servers.is_error is False
    admission.close()


def test_a_server_that_does_not_answer_its_greeting_may_come_again(servers, admission) -> None:
    servers.troubles["first:1"] = TimeoutError("A call into TensorFlow has not returned in 30 s.")
    assert admission.admit({FIRST: Run(1)}, ADDRESSES) == {}
    assert not admission.is_refused(1)
    del servers.troubles["first:1"]
    assert set(admission.admit({FIRST: Run(1)}, ADDRESSES)) == {FIRST}
