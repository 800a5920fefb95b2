"""The handshake with servers: version, devices, registration; and whether they still have their variables."""

import re
import types

import pytest
import tensorflow as tf

from coordinator.errors import DeviceMismatchError, VersionMismatchError
from coordinator.heartbeat.probes import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.clients import Client
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.handshake import (
    Handshake,
    SentinelVariables,
    WorkerDevices,
    calling_device,
    check_version,
    graph_version,
)
from tests.ps_strategy.membership.fake_servers import ADDRESSES, FIRST, PS, SECOND

CLIENT = Client(5, "client:1", "host")
LONGEST_CALL = 10.0
DEVICES = ("/job:ps/replica:0/task:1", "/job:worker/replica:0/task:0")
ADDRESS = "10.0.0.1:2222"


def run(incarnation: int) -> Connection:
    return Connection(incarnation, number=incarnation, since=0.0, calling_device="/device:CPU:0")


class Servers:
    """Replaces the functions that call servers; `errors` has what the handshake with a server raises, by address."""

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


def test_a_server_that_dies_or_is_silent_during_its_handshake_may_return(servers) -> None:
    handshakes = Handshake(CLIENT, Options())
    for error in (tf.errors.UnavailableError(None, None, "Socket closed"), TimeoutError("30 s")):
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


def test_several_gpus_are_replicas_or_else_the_cpus_and_the_first_gpu_is_called() -> None:
    for names, replicas, caller in (
        (["CPU:0", "XLA_GPU:0"], ["CPU:0"], "CPU:0"),
        (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1"], "CPU:0"),
        (["CPU:0", "CPU:1", "GPU:0"], ["CPU:0"], "GPU:0"),
        (["CPU:0", "GPU:1", "GPU:0"], ["GPU:0", "GPU:1"], "GPU:0"),
    ):
        devices = [f"/job:worker/replica:0/task:3/device:{name}" for name in names]
        assert sorted(WorkerDevices.of(devices).names) == [f"/device:{name}" for name in replicas]
        assert calling_device(devices) == f"/device:{caller}"


def test_two_versions_are_compared(monkeypatch):
    monkeypatch.setattr(tf.version, "GRAPH_DEF_VERSION", 2474)
    for theirs, difference in (
        (2129, "an older TensorFlow (graph version 2129, not 2474)"),
        (2600, "a newer TensorFlow (graph version 2600, not 2474)"),
        (None, "another TensorFlow, whose graphs cannot be read here,"),
    ):
        monkeypatch.setattr(handshake, "graph_version", lambda device, theirs=theirs: theirs)
        with pytest.raises(VersionMismatchError, match=re.escape(f"runs {difference} than this program")):
            check_version(DEVICES[0], ADDRESS, is_error=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_server_of_another_version_is_an_error_or_a_warning(strategy, monkeypatch, caplog, device):
    assert graph_version(device) == tf.version.GRAPH_DEF_VERSION
    check_version(device, ADDRESS, is_error=True)
    assert not caplog.records
    monkeypatch.setattr(tf.version, "GRAPH_DEF_VERSION", tf.version.GRAPH_DEF_VERSION - 345)
    with pytest.raises(VersionMismatchError, match=r'newer TensorFlow .*Options\(version_mismatch="warn"\)') as caught:
        check_version(device, ADDRESS, is_error=True)
    assert f"{device} ({ADDRESS})" in str(caught.value)
    check_version(device, ADDRESS, is_error=False)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "runs a newer TensorFlow" in record.getMessage()


def test_a_server_that_cannot_write_the_test_graph_has_another_version(strategy, monkeypatch):
    def refuse(**_):
        raise tf.errors.NotFoundError(None, None, "Op type not registered 'DatasetToGraphV2'")

    monkeypatch.setattr(handshake.tf.raw_ops, "DatasetToGraphV2", refuse)
    assert graph_version(DEVICES[0]) is None


def test_a_running_server_has_its_sentinel(strategy):
    sentinels = SentinelVariables(LONGEST_CALL)
    assert sentinels.place({7 + server.index: server.device for server in strategy.parameter_servers}) == set()
    assert sentinels.are_reachable([7, 8])
    assert sentinels.gone([7, 8]) == set()


def test_a_slow_read_is_not_a_loss_and_a_late_error_is_retried(monkeypatch):
    late, gone = tf.errors.DeadlineExceededError(None, None, "late"), tf.errors.NotFoundError(None, None, "gone")
    variable = types.SimpleNamespace(numpy=None)
    outcomes = [variable, TimeoutError(), TimeoutError(), late, True, late, gone]

    def call_within(seconds, name, call):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(handshake, "call_within", call_within)
    sentinels = SentinelVariables(LONGEST_CALL)
    assert sentinels.place({1: "/job:ps/task:0"}) == set()
    assert sentinels.gone([1]) == set(), "too long"
    assert not sentinels.are_reachable([1]), "too long"
    assert sentinels.gone([1]) == set(), "late, then there"
    assert sentinels.gone([1]) == {1}, "late, then gone"
    assert not outcomes


def test_workers_that_do_not_answer_count_as_unreached(monkeypatch, strategy):
    def refuse(*args, **kwargs):
        raise tf.errors.InvalidArgumentError(None, None, "Client for target ... not found.")

    sentinels, workers = SentinelVariables(LONGEST_CALL), [Task("worker", 0)]
    sentinels.place({server.index: server.device for server in strategy.parameter_servers})
    with monkeypatch.context() as patch:
        patch.setattr(tf, "function", refuse)
        assert sentinels.unreached_from(workers, [0, 1]) == workers
        assert not sentinels.reach_each_other([0, 1])
    assert sentinels.unreached_from(workers, [0, 1]) == []
    assert sentinels.reach_each_other([0, 1])
