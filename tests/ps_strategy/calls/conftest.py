"""A variable and functions that count in it; servers in a dictionary, and connections to them without a network."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from coordinator.options import Options
from coordinator.ps_strategy.calls import tensorflow_runtime
from coordinator.ps_strategy.membership import clients, cluster_change, membership
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition
from coordinator.ps_strategy.membership.membership import Membership
from tests.ps_strategy.membership.fake_servers import (
    ADDRESSES,
    FakeGoodbye,
    FakeHandshake,
    FakeLease,
    FakeSentinels,
    FakeServers,
)


@pytest.fixture
def counter(strategy) -> tf.Variable:
    with strategy.scope():
        return tf.Variable(0)


@pytest.fixture
def count(counter):
    return tf.function(lambda: counter.assign_add(1))


@pytest.fixture
def add(counter):
    """Adds to the counter."""

    @tf.function
    def add(number):
        return tf.identity(counter.assign_add(number))

    return add


@pytest.fixture
def servers(monkeypatch) -> FakeServers:
    servers = FakeServers()
    monkeypatch.setattr(membership, "TaskProbe", servers.probe)
    monkeypatch.setattr(membership, "Heartbeat", lambda interval, timeout: servers)
    monkeypatch.setattr(membership, "ServerLinks", lambda timeout: servers)
    fakes = {"ClientLease": FakeLease, "Goodbye": FakeGoodbye, "Handshake": FakeHandshake}
    for name, fake in (fakes | {"SentinelVariables": FakeSentinels}).items():
        monkeypatch.setattr(membership, name, fake)
    monkeypatch.setattr(membership, "context_id", lambda: 5)
    monkeypatch.setattr(cluster_change, "update_server_def", servers.update_server_def)
    for name in ("current_server_def", "set_server_def", "check_port_is_free"):
        monkeypatch.setattr(clients, name, lambda *_: None)
    monkeypatch.setattr(tensorflow_runtime, "bind_executor", lambda: SimpleNamespace(clear_error=lambda: None))
    return servers


@pytest.fixture
def connect(servers):
    connected = []

    def connect(**options) -> Membership:
        options = Options(reconnect_interval=0.001, close_timeout=0.05, **options)
        connected.append(Membership.connected(ClusterDefinition(ADDRESSES, "client:1", "grpc"), options))
        return connected[-1]

    yield connect
    for connection in connected:
        connection.close()
