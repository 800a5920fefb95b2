"""The lease is renewed on time, on the servers that are held and no others."""

import threading
from types import SimpleNamespace

import pytest

from coordinator.options import Options
from coordinator.ps_strategy import client_lease
from coordinator.ps_strategy.client_lease import ClientLease
from coordinator.ps_strategy.server_context import Answer
from tests.deadline import wait_until


class Servers:
    """Contexts that count their renewals.

    Attributes:
      renewals: how many, by address.
      answers: what a server answers, `HELD` where nothing else is said.
      closed: the addresses whose connections were given back.
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
    monkeypatch.setattr(client_lease, "ServerContext", servers.context)
    return servers


@pytest.fixture
def lease(servers):
    lease = ClientLease(5, Options(client_timeout=0.04))
    yield lease
    lease.close()


def test_it_is_renewed_again_and_again_on_every_held_server(servers, lease) -> None:
    lease.hold(["a:1", "b:1"])
    wait_until(lambda: servers.renewals.get("a:1", 0) >= 3 and servers.renewals.get("b:1", 0) >= 3)


def test_a_server_that_is_let_go_is_not_asked_again(servers, lease) -> None:
    lease.hold(["a:1", "b:1"])
    wait_until(lambda: servers.renewals.get("a:1"))
    lease.hold(["b:1"])
    assert servers.closed == ["a:1"]
    count, other = servers.renewals["a:1"], servers.renewals.get("b:1", 0)
    wait_until(lambda: servers.renewals.get("b:1", 0) >= other + 3)
    assert servers.renewals["a:1"] == count
    assert not lease.is_forgotten("a:1"), "nobody knows"


@pytest.mark.parametrize("answer", list(Answer))
def test_only_a_server_that_says_so_has_forgotten_us(servers, answer: Answer) -> None:
    lease = ClientLease(5, Options(client_timeout=600))
    lease.hold(["a:1"])
    servers.answers["a:1"] = answer
    assert lease.is_forgotten("a:1") is (answer is Answer.UNKNOWN)
    lease.close()


def test_closing_ends_the_thread_and_gives_the_connections_back(servers, lease) -> None:
    lease.hold(["a:1"])
    assert lease._thread.name == "coordinator-lease"
    lease.close()
    lease.close()
    assert servers.closed == ["a:1"]
    assert not lease._thread.is_alive()
