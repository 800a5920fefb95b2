"""Tests of the plan of a change of the cluster, as a table, and of the time limit of a change."""

import contextlib
import socket
import threading

import pytest
import tensorflow as tf

from coordinator.launch.server_process import free_addresses
from coordinator.ps_strategy.membership import cluster_change
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges, Connection, plan_change
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.testing.status_server import CPU, StatusService, encoded_device
from tests.deadline import wait_until

TIMEOUT = 60.0
PS, OTHER_PS, FIRST, SECOND = Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1)
SERVERS = (PS, OTHER_PS)


def connection(incarnation: int = 1) -> Connection:
    return Connection(incarnation, number=incarnation, since=0.0, calling_device="/device:CPU:0")


ALL = {task: connection() for task in (PS, OTHER_PS, FIRST, SECOND)}
ANSWERING = dict.fromkeys(ALL, 1)


def kept(*tasks: Task) -> dict[Task, Connection]:
    return {task: ALL[task] for task in tasks}


@pytest.mark.parametrize(
    ("connected", "adding", "answering", "plan"),
    [
        pytest.param({}, ALL, ANSWERING, ({}, ANSWERING), id="first connection"),
        pytest.param({}, ALL, {PS: 1, FIRST: 1}, None, id="not all parameter servers answer"),
        pytest.param({}, ALL, {}, ({}, {}), id="no server answers"),
        pytest.param({}, (), {}, ({}, {}), id="closing"),
        pytest.param(ALL, (), ANSWERING, (ALL, {}), id="no change"),
        pytest.param(
            kept(PS, OTHER_PS, FIRST),
            [SECOND],
            ANSWERING,
            (kept(PS, OTHER_PS, FIRST), {SECOND: 1}),
            id="added",
        ),
        pytest.param(
            kept(PS, OTHER_PS, FIRST),
            [SECOND],
            {PS: 1, OTHER_PS: 1, FIRST: 1},
            (kept(PS, OTHER_PS, FIRST), {}),
            id="added but silent",
        ),
        pytest.param(ALL, (), {PS: 1, OTHER_PS: 1, SECOND: 1}, (kept(PS, OTHER_PS, SECOND), {}), id="a lost worker"),
        pytest.param(
            ALL,
            (),
            {**ANSWERING, FIRST: 2},
            (kept(PS, OTHER_PS, SECOND), {FIRST: 2}),
            id="a restarted worker",
        ),
        pytest.param(ALL, (), {PS: 1, FIRST: 1, SECOND: 1}, None, id="a lost parameter server"),
        pytest.param(ALL, (), {**ANSWERING, PS: 2}, None, id="a restarted parameter server"),
        pytest.param(
            kept(PS, FIRST),
            [OTHER_PS],
            {PS: 1, OTHER_PS: 2, FIRST: 1},
            (kept(PS, FIRST), {OTHER_PS: 2}),
            id="a recovered parameter server",
        ),
        pytest.param(kept(PS, FIRST), (), ANSWERING, None, id="one parameter server left out"),
    ],
)
def test_reachable_workers_are_connected_and_all_parameter_servers_or_none(connected, adding, answering, plan):
    assert plan_change(connected, adding, answering, SERVERS) == plan


@pytest.fixture
def endless_change(monkeypatch):
    """Makes TensorFlow's next change of the cluster last until the returned event is set."""
    may_end, begun = threading.Event(), []

    def wait(definition, client_timeout):
        begun.append(definition)
        assert may_end.wait(TIMEOUT)

    monkeypatch.setattr(cluster_change, "update_server_def", wait)
    yield may_end, begun
    may_end.set()


def test_a_change_that_does_not_end_times_out_and_the_next_one_waits_for_it(endless_change, caplog):
    may_end, begun = endless_change
    changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=0.05)
    server, leaving, staying = Task("ps", 0), Task("worker", 0), Task("worker", 1)
    changes.addresses = {server: "127.0.0.1:2", leaving: "127.0.0.1:3", staying: "127.0.0.1:4"}
    left = {server: "127.0.0.1:2", staying: "127.0.0.1:4"}
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.apply(left)
    assert [record.args[0] for record in caplog.records if record.args] == ["127.0.0.1:3"], (
        "those that stay are not disturbed"
    )
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.apply({})
    assert len(begun) == 1, "one change at a time"
    may_end.set()
    changes.apply(left)
    assert len(begun) == 2
    assert changes.addresses == left
    may_end.clear()
    caplog.clear()
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.apply({})
    assert [record.args[0] for record in caplog.records if record.args] == ["127.0.0.1:4", "127.0.0.1:2"], (
        "workers first"
    )
    may_end.set()
    changes.close()


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_servers_that_hold_up_a_change_are_named(endless_change, caplog, is_silent):
    may_end, _ = endless_change
    first, second = free_addresses(2)
    changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=0.05)
    with StatusService(first, lambda: encoded_device(CPU, 1)), contextlib.ExitStack() as opened:
        if is_silent:
            port = int(second.rpartition(":")[2])
            # It accepts connections, and says nothing, as a frozen server does.
            opened.enter_context(socket.create_server(("127.0.0.1", port)))
        else:
            opened.enter_context(StatusService(second, lambda: encoded_device(CPU, 2)))
        changes.addresses = {Task("worker", 0): first, Task("worker", 1): second}
        with pytest.raises(tf.errors.DeadlineExceededError):
            changes.apply({})
    expected = f"{second} did not answer" if is_silent else f"{first}, {second} did not end this client's calls"
    assert caplog.records[0].getMessage().startswith(expected)
    may_end.set()
    changes.close()


def test_a_change_waits_for_one_of_another_strategy(endless_change):
    may_end, begun = endless_change
    first, second = (ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=0.05) for _ in range(2))
    for changes in (first, second):
        with pytest.raises(tf.errors.DeadlineExceededError):
            changes.apply({})
    assert len(begun) == 1, "one change at a time"
    may_end.set()
    second.apply({})
    assert len(begun) == 2
    second.close()
    first.close()


def test_a_shortened_timeout_applies_to_a_change_in_progress(endless_change, monkeypatch):
    monkeypatch.setattr(cluster_change, "PATIENCE_AT_CLOSE", 0.05)
    may_end, begun = endless_change
    changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=1000.0)
    waiting = on_own_thread("patient-change", lambda: changes.apply({}))
    wait_until(lambda: begun)
    assert changes.hurry() == 0.25
    with pytest.raises(tf.errors.DeadlineExceededError):
        waiting.result(TIMEOUT)
    may_end.set()
    changes.apply({})
    changes.close()
