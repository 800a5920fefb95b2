"""Who is connected, by what the admission says; servers are a dictionary here, and TensorFlow is told nothing."""

from types import SimpleNamespace

import pytest

from coordinator.errors import VersionMismatchError
from coordinator.heartbeat.pulse import Pulse, PulseState
from coordinator.heartbeat.task_probe import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy import membership, tensorflow_internals
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition
from coordinator.ps_strategy.membership.membership import Membership
from tests.ps_strategy.fake_admission import FakeAdmission
from tests.ps_strategy.membership.fake_sentinels import FakeWitnesses
from tests.ps_strategy.membership.fake_servers import ADDRESSES, FIRST, PS, SECOND

NO_HEARTBEAT = SimpleNamespace(
    start=lambda: None,
    close=lambda: None,
    watch=lambda address: None,
    is_silent=lambda address: False,
    last_silence=lambda address: 0.0,
    state=lambda address: Pulse(PulseState.ANSWERING, 1),
)


@pytest.fixture
def witnesses() -> FakeWitnesses:
    return FakeWitnesses(10.0)


@pytest.fixture
def admission(monkeypatch, witnesses) -> FakeAdmission:
    admission = FakeAdmission()
    probe = SimpleNamespace(status=lambda timeout: TaskStatus(1, ("CPU:0",)), close=lambda: None)
    monkeypatch.setattr(membership, "ServerAdmission", lambda address, options: admission)
    monkeypatch.setattr(membership, "Heartbeat", lambda interval, timeout: NO_HEARTBEAT)
    monkeypatch.setattr(membership, "Witnesses", lambda longest_call: witnesses)
    monkeypatch.setattr(membership, "TaskProbe", lambda address: probe)
    monkeypatch.setattr(tensorflow_internals, "update_server_def", lambda definition, client_timeout: None)
    return admission


@pytest.fixture
def members(admission) -> Membership:
    return Membership(ClusterDefinition(ADDRESSES, None, "grpc"), "client:1", Options(connect_timeout=0.05))


def test_a_worker_that_has_forgotten_us_is_lost_and_connected_to_anew(admission, members):
    members.connect()
    before = members.connection(FIRST)
    admission.forgetful.add(ADDRESSES[FIRST])
    assert not members.is_connected(FIRST)
    assert members.is_connected(SECOND)
    assert members.reconnect(FIRST)
    assert members.connection(FIRST) != before


def test_a_parameter_server_that_has_forgotten_us_is_lost(admission, members):
    members.connect()
    assert members.lost_parameter_server() is None
    admission.forgetful.add(ADDRESSES[PS])
    assert "not heard of for long" in str(members.lost_parameter_server())
    assert members.reconnect_parameter_servers()
    assert members.lost_parameter_server() is None


def test_a_worker_that_is_not_admitted_is_not_connected(admission, members):
    admission.strange.add(ADDRESSES[SECOND])
    members.connect()
    assert members.is_connected(FIRST)
    assert not members.is_connected(SECOND)
    assert not members.reconnect(SECOND)


def test_a_server_of_another_version_ends_the_connecting(admission, members):
    def refuse():
        raise VersionMismatchError("It runs another TensorFlow.")

    admission.raise_refusal = refuse
    with pytest.raises(VersionMismatchError):
        members.connect()


def test_a_server_that_was_refused_is_not_named_again(admission, members):
    admission.is_refused = lambda incarnation: True
    with pytest.raises(TimeoutError, match=r"/job:ps/task:0 \(ps:1\), any worker .* did not answer"):
        members.connect()


def test_the_suspicion_is_named_where_connecting_fails_although_all_answer(members, monkeypatch):
    import tensorflow as tf

    def fail(definition, client_timeout):
        raise tf.errors.InternalError(None, None, "Not of my kind.")

    monkeypatch.setattr(tensorflow_internals, "update_server_def", fail)
    with pytest.raises(TimeoutError, match=r"Not of my kind\. Do they run the same TensorFlow as this program"):
        members.connect()


def test_a_worker_that_does_not_reach_a_recovered_server_is_let_go(admission, witnesses, members):
    members.connect()
    admission.forgetful.add(ADDRESSES[PS])
    assert members.reconnect_parameter_servers()
    witnesses.unreaching.add(FIRST)
    members.reach_parameter_servers()
    assert not members.is_connected(FIRST)
    assert members.is_connected(SECOND)
    assert not members.reconnect(FIRST), "it takes no work before it reaches all parameter servers"
    witnesses.unreaching.clear()
    assert members.reconnect(FIRST)
    members.reach_parameter_servers()
    assert members.is_connected(FIRST)


def test_parameter_servers_that_do_not_reach_each_other_are_told_of_after_a_recovery(
    admission, witnesses, members, caplog
):
    members.connect()
    witnesses.apart = True
    assert members.reconnect(FIRST), "a worker that returns has nothing to do with that"
    assert "reach each other" not in caplog.text
    members.reach_parameter_servers()
    assert "The parameter servers do not all reach each other yet" in caplog.text
