"""Tests of queries about a client's context on a server, of freeing it, and of the renewal of leases."""

import socket
import threading
from types import SimpleNamespace

import pytest

from coordinator.options import Options
from coordinator.ps_strategy.membership import clients
from coordinator.ps_strategy.membership.clients import Answer, ClientLease, RemoteContext
from coordinator.ps_strategy.tensorflow_internals.process import context_id
from tests.deadline import wait_until


def test_no_process_and_a_silent_process_are_distinguished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with RemoteContext(address, 1) as context:
            assert context.renew(0.3) is Answer.SILENT
    with RemoteContext(address, 1) as context:
        assert context.renew(10.0) is Answer.UNREACHED
        assert context.release(10.0) is Answer.UNREACHED


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_server_knows_its_clients(strategy, shared_cluster, job) -> None:
    address = shared_cluster.spec[job][0]
    own = context_id()
    with RemoteContext(address, own) as context:
        assert context.renew(10.0) is Answer.HELD
    with RemoteContext(address, own ^ 1) as another:
        assert another.renew(10.0) is Answer.UNKNOWN
        assert another.release(10.0) is Answer.HELD, "a missing context counts as freed"


class Servers:
    """Fake contexts that count their renewals.

    Attributes:
      renewals: how many, by address.
      answers: what a server answers, `HELD` where nothing else is said.
      closed: the addresses whose connections were closed.
    """

    def __init__(self) -> None:
        self.renewals: dict[str, int] = {}
        self.answers: dict[str, Answer] = {}
        self.closed: list[str] = []
        self.lock = threading.Lock()

    def context(self, address: str, context_id: int) -> SimpleNamespace:
        assert context_id == 5

        def begin_renewal(timeout: float):
            with self.lock:
                self.renewals[address] = self.renewals.get(address, 0) + 1
            return lambda: self.answers.get(address, Answer.HELD)

        return SimpleNamespace(begin_renewal=begin_renewal, close=lambda: self.closed.append(address))


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(clients, "RemoteContext", servers.context)
    return servers


@pytest.fixture
def lease(servers):
    lease = ClientLease(5, Options(client_timeout=0.04))
    yield lease
    lease.close()


def test_a_lease_is_renewed_on_each_of_its_servers(servers, lease) -> None:
    lease.hold(["a:1", "b:1"])
    wait_until(lambda: servers.renewals.get("a:1", 0) >= 3 and servers.renewals.get("b:1", 0) >= 3)


def test_a_server_removed_from_the_lease_is_not_called_again(servers, lease) -> None:
    lease.hold(["a:1", "b:1"])
    wait_until(lambda: servers.renewals.get("a:1"))
    lease.hold(["b:1"])
    assert servers.closed == ["a:1"]
    count, other = servers.renewals["a:1"], servers.renewals.get("b:1", 0)
    wait_until(lambda: servers.renewals.get("b:1", 0) >= other + 3)
    assert servers.renewals["a:1"] == count
    assert lease.freed(["a:1"]) == set(), "its server is not called"


@pytest.mark.parametrize("answer", list(Answer))
def test_a_context_counts_as_freed_only_if_its_server_says_so(servers, answer: Answer) -> None:
    lease = ClientLease(5, Options(client_timeout=600))
    lease.hold(["a:1"])
    servers.answers["a:1"] = answer
    assert lease.freed(["a:1", "b:1"]) == ({"a:1"} if answer is Answer.UNKNOWN else set())
    lease.close()


def test_closing_a_lease_ends_its_thread_and_connections(servers, lease) -> None:
    lease.hold(["a:1"])
    [thread] = [each for each in threading.enumerate() if each.name == "coordinator-lease"]
    lease.close()
    lease.close()
    assert servers.closed == ["a:1"]
    assert not thread.is_alive()
