"""Tests of which servers are connected, given fake handshakes and sentinels, without servers or TensorFlow."""

import concurrent.futures
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import tensorflow as tf

from coordinator.errors import LaunchError, VersionMismatchError
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState
from coordinator.heartbeat.probes import Obstacle, TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy import strategy_parts
from coordinator.ps_strategy.membership import clients, cluster_change, membership
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, server_def
from coordinator.ps_strategy.membership.membership import Membership
from coordinator.ps_strategy.strategy_parts import StrategyParts
from tests.ps_strategy.membership.fake_servers import (
    ADDRESSES,
    FIRST,
    PS,
    SECOND,
    FakeGoodbye,
    FakeHandshake,
    FakeLease,
    FakeSentinels,
)

NO_HEARTBEAT = SimpleNamespace(
    close=lambda: None,
    watch=lambda address: None,
    state=lambda address: ServerState(Liveness.ANSWERING, 1),
)


@pytest.fixture
def sentinels() -> FakeSentinels:
    return FakeSentinels(10.0)


@pytest.fixture
def lease() -> FakeLease:
    return FakeLease()


@pytest.fixture
def handshake(monkeypatch, sentinels, lease) -> FakeHandshake:
    handshake = FakeHandshake()
    probe = SimpleNamespace(begin_status=lambda timeout: lambda: TaskStatus(1, ("CPU:0",)), close=lambda: None)
    whole_links = SimpleNamespace(broken=lambda links: {}, close=lambda: None)
    fakes = {
        "Handshake": handshake,
        "ClientLease": lease,
        "Heartbeat": NO_HEARTBEAT,
        "ServerLinks": whole_links,
        "SentinelVariables": sentinels,
        "TaskProbe": probe,
        "context_id": 5,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(membership, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(membership, "Goodbye", FakeGoodbye)
    monkeypatch.setattr(membership, "find_obstacles", lambda addresses: dict.fromkeys(addresses, Obstacle.REFUSED))
    monkeypatch.setattr(cluster_change, "update_server_def", lambda definition, client_timeout: None)
    return handshake


@pytest.fixture
def members(handshake) -> Iterator[Membership]:
    members = Membership(ClusterDefinition(ADDRESSES, None, "grpc"), "client:1", Options(connect_timeout=0.05))
    yield members
    members.close()


def test_a_server_that_freed_our_context_is_lost_and_reconnected(lease, members):
    members.connect()
    before = members.begin_attempt(0)
    lease.freed_on.add(ADDRESSES[FIRST])
    assert not members.is_reachable(0)
    assert members.is_reachable(1)
    assert members.reconnect(0)
    assert members.begin_attempt(0) != before
    assert members.lost_parameter_server() is None
    lease.freed_on.add(ADDRESSES[PS])
    assert "not heard from for long" in str(members.lost_parameter_server())
    assert members.reconnect_parameter_servers()
    assert members.lost_parameter_server() is None


def test_a_worker_that_is_not_admitted_is_not_connected(handshake, lease, members):
    handshake.excluded.add(ADDRESSES[SECOND])
    members.connect()
    assert members.is_reachable(0)
    assert not members.is_reachable(1)
    assert not members.reconnect(1)
    assert lease.held == {ADDRESSES[PS], ADDRESSES[FIRST]}
    members.disconnect(0)
    assert lease.held == {ADDRESSES[PS], ADDRESSES[FIRST]}, "a server that was never connected is not lost"
    assert members.begin_attempt(0) is not None
    members.disconnect(0)
    assert lease.held == {ADDRESSES[PS]}


def test_a_server_of_another_version_makes_connect_raise_and_is_not_connected_again(handshake, members):
    def refuse(new, addresses):
        handshake.refused[1] = VersionMismatchError("It runs another TensorFlow.")
        return {}

    handshake.admit = refuse
    with pytest.raises(VersionMismatchError):
        members.connect()
    with pytest.raises(TimeoutError, match=r"/job:ps/task:0 \(ps:1\), any worker .* did not answer"):
        members.connect()


def test_a_missing_server_is_named_with_what_a_connection_to_it_shows(members, monkeypatch):
    found = {"ps:1": Obstacle.UNRESOLVED, "first:1": Obstacle.REFUSED, "second:1": Obstacle.REFUSED}
    monkeypatch.setattr(membership, "find_obstacles", lambda addresses: {name: found[name] for name in addresses})
    monkeypatch.setattr(membership.Membership, "_answering", lambda self, tasks: set())
    with pytest.raises(TimeoutError) as caught:
        members.connect()
    assert str(caught.value) == (
        "No connection within 0.05 s: /job:ps/task:0 (ps:1), any worker (first:1, second:1) did not answer. "
        f"ps:1: {Obstacle.UNRESOLVED.value}; first:1, second:1: {Obstacle.REFUSED.value}. See also "
        "Options.connect_timeout."
    )
    assert membership.shortened([f"w{index}" for index in range(100)]) == "w0, w1, w2, w3 and 96 more"


def test_a_wait_for_servers_says_what_is_awaited_and_for_how_long(handshake, monkeypatch, caplog):
    options = Options(connect_timeout=1, stall_report_interval=0.01, reconnect_interval=0.01)
    members = Membership(ClusterDefinition(ADDRESSES, None, "grpc"), "client:1", options)
    answering = membership.Membership._answering  # noqa: SLF001 - replaced below
    monkeypatch.setattr(
        membership.Membership,
        "_answering",
        lambda self, tasks: answering(self, tasks) if "Waiting for" in caplog.text else {FIRST, SECOND},
    )
    members.connect()
    assert f"Waiting for /job:ps/task:0 (ps:1) to answer, 0 s of at most 1 s. ps:1: {Obstacle.REFUSED.value}." in [
        record.getMessage() for record in caplog.records
    ]
    members.close()


def test_the_loss_of_a_server_is_described_by_what_a_connection_to_it_shows(lease, members, monkeypatch):
    members.connect()
    assert members.describe_loss(0) == "first:1 answers again"
    lease.freed_on.add(ADDRESSES[FIRST])
    assert "first:1 was restarted, or not heard from for long, and lost" in members.describe_loss(0)
    monkeypatch.setattr(membership.Membership, "_probe", lambda self, tasks: {})
    assert members.describe_loss(0) == f"first:1 does not answer: {Obstacle.REFUSED.value}"
    lost = str(members.lost_parameter_server())
    assert f"/job:ps/task:0 was lost (ps:1 does not answer: {Obstacle.REFUSED.value})." in lost
    assert members.describe_loss(7) == "it was removed"


def test_a_port_of_the_client_that_is_in_use_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(clients, "current_server_def", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        definition = ClusterDefinition(ADDRESSES, f"127.0.0.1:{port}", "grpc")
        with pytest.raises(LaunchError, match=f"cannot serve on 127.0.0.1:{port}: port {port}: Address"):
            Membership.connected(definition, Options())


def test_the_environment_does_not_change_before_the_last_strategy_has_disconnected(monkeypatch):
    """TensorFlow reads it with each remote call, on other threads: adding a variable then may end the process."""
    before, begun = dict(os.environ), concurrent.futures.Future()
    monkeypatch.setattr(ClusterChanges, "_in_progress", begun)
    monkeypatch.setattr(strategy_parts, "client_environment", lambda: pytest.fail("the change has not ended"))
    with pytest.raises(RuntimeError, match="still connected to the servers of its last strategy"):
        StrategyParts.connected(object, None, Options(connect_timeout=0.01), contextlib.ExitStack())
    assert dict(os.environ) == before


def test_a_further_strategy_says_that_the_client_keeps_its_address(monkeypatch, caplog):
    monkeypatch.setattr(clients, "current_server_def", lambda: server_def("grpc", "localhost:1", {}))
    for reserved in (None, "localhost:1", "localhost:2"):
        assert not caplog.text
        assert clients.join_as_client(ClusterDefinition(ADDRESSES, reserved, "grpc")) == "localhost:1"
    assert "reserves localhost:2 for /job:chief/task:0, but this program keeps the server at localhost:1" in caplog.text


def test_connecting_that_fails_although_all_answer_names_the_likely_cause(members, monkeypatch, caplog):
    def fail(definition, client_timeout):
        raise tf.errors.InternalError(None, None, "Not of my kind.")

    monkeypatch.setattr(cluster_change, "update_server_def", fail)
    with (
        caplog.at_level(logging.DEBUG, logger="coordinator"),
        pytest.raises(TimeoutError, match=r"\(InternalError; .* Do they run the same TensorFlow as this program"),
    ):
        members.connect()
    assert "Not of my kind." in caplog.text


def test_a_worker_that_does_not_reach_a_recovered_server_is_disconnected(lease, sentinels, members):
    members.connect()
    lease.freed_on.add(ADDRESSES[PS])
    assert members.reconnect_parameter_servers()
    sentinels.unreaching.add(FIRST)
    members.reach_parameter_servers()
    assert not members.is_reachable(0)
    assert members.is_reachable(1)
    assert not members.reconnect(0), "it takes no work before it reaches all parameter servers"
    sentinels.unreaching.clear()
    assert members.reconnect(0)
    members.reach_parameter_servers()
    assert members.is_reachable(0)


def test_parameter_servers_that_do_not_reach_each_other_are_logged(sentinels, members, caplog):
    members.connect()
    sentinels.apart = True
    assert members.reconnect(0), "the return of a worker does not change that"
    assert "reach each other" not in caplog.text
    members.reach_parameter_servers()
    assert "The parameter servers do not all reach each other yet" in caplog.text
