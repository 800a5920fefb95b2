"""Tests of the plan of a change of the cluster, as a table, and of the time limit of a change and of other calls."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from coordinator.launch.server_process import free_addresses
from coordinator.ps_strategy.membership import cluster_change
from coordinator.ps_strategy.membership.bounded_calls import CallThread, call_within, on_own_thread
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges, Connection, plan_change
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.testing.status_server import CPU, StatusService, encoded_device
from tests.deadline import LIMIT, wait_until

PS, OTHER_PS, FIRST, SECOND = Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1)
ALL = {
    task: Connection(1, number=1, since=0.0, calling_device="/device:CPU:0") for task in (PS, OTHER_PS, FIRST, SECOND)
}
ANSWERING = dict.fromkeys(ALL, 1)


def kept(*tasks: Task) -> dict[Task, Connection]:
    return {task: ALL[task] for task in tasks}


def answering(*tasks: Task) -> dict[Task, int]:
    return dict.fromkeys(tasks, 1)


THREE, LEFT_OUT = kept(PS, OTHER_PS, FIRST), kept(PS, FIRST)
# By what happens: those connected, those to add, those that answer; then those that stay and the new ones, or None.
PLANS = {
    "first connection": ({}, ALL, ANSWERING, ({}, ANSWERING)),
    "not all parameter servers answer": ({}, ALL, answering(PS, FIRST), None),
    "no server answers": ({}, ALL, {}, ({}, {})),
    "closing": ({}, (), {}, ({}, {})),
    "no change": (ALL, (), ANSWERING, (ALL, {})),
    "added": (THREE, [SECOND], ANSWERING, (THREE, {SECOND: 1})),
    "added but silent": (THREE, [SECOND], answering(*THREE), (THREE, {})),
    "a lost worker": (ALL, (), answering(PS, OTHER_PS, SECOND), (kept(PS, OTHER_PS, SECOND), {})),
    "a restarted worker": (ALL, (), {**ANSWERING, FIRST: 2}, (kept(PS, OTHER_PS, SECOND), {FIRST: 2})),
    "a lost parameter server": (ALL, (), answering(PS, FIRST, SECOND), None),
    "a restarted parameter server": (ALL, (), {**ANSWERING, PS: 2}, None),
    "a recovered one": (LEFT_OUT, [OTHER_PS], {**ANSWERING, OTHER_PS: 2}, (LEFT_OUT, {OTHER_PS: 2})),
    "one parameter server left out": (LEFT_OUT, (), ANSWERING, None),
}


@pytest.mark.parametrize(("connected", "adding", "answering", "plan"), PLANS.values(), ids=PLANS)
def test_reachable_workers_are_connected_and_all_parameter_servers_or_none(connected, adding, answering, plan):
    assert plan_change(connected, adding, answering, (PS, OTHER_PS)) == plan


@pytest.fixture
def endless(monkeypatch) -> Iterator[tuple[threading.Event, list]]:
    """TensorFlow's changes of the cluster last until the event is set."""
    may_end, begun = threading.Event(), []

    def wait(definition, client_timeout):
        begun.append(definition)
        assert may_end.wait(LIMIT)

    monkeypatch.setattr(cluster_change, "update_server_def", wait)
    yield may_end, begun
    may_end.set()


@pytest.fixture
def new_changes(endless) -> Iterator[Callable[..., ClusterChanges]]:
    with contextlib.ExitStack() as closing:

        def new_changes(patience: float = 0.05) -> ClusterChanges:
            changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=patience)
            closing.enter_context(contextlib.closing(changes))
            closing.callback(endless[0].set)
            return changes

        yield new_changes


def check_too_long(changes: ClusterChanges, addresses: dict) -> None:
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.apply(addresses)


def test_a_change_that_does_not_end_times_out_and_the_next_one_waits_for_it(endless, new_changes, caplog):
    may_end, begun = endless
    changes, of_another_strategy = new_changes(), new_changes()
    changes.addresses = {PS: "127.0.0.1:2", FIRST: "127.0.0.1:3", SECOND: "127.0.0.1:4"}
    left = {PS: "127.0.0.1:2", SECOND: "127.0.0.1:4"}

    def shut_down() -> list[str]:
        return [record.args[0] for record in caplog.records if record.args]

    check_too_long(changes, left)
    assert shut_down() == ["127.0.0.1:3"], "those that stay are not disturbed"
    check_too_long(changes, {})
    check_too_long(of_another_strategy, {})
    assert len(begun) == 1, "one change at a time"
    may_end.set()
    changes.apply(left)
    assert (len(begun), changes.addresses) == (2, left)
    may_end.clear()
    caplog.clear()
    check_too_long(changes, {})
    assert shut_down() == ["127.0.0.1:4", "127.0.0.1:2"], "workers first"


def test_leaving_disconnects_once_the_change_in_progress_ends_and_nothing_follows(endless, new_changes):
    may_end, begun = endless
    changes = new_changes()
    check_too_long(changes, {PS: "127.0.0.1:2", FIRST: "127.0.0.1:3"})
    changes.leave()
    assert not ClusterChanges.wait_ended(0)
    with pytest.raises(tf.errors.CancelledError):
        on_own_thread("late-change", lambda: (may_end.set(), changes.apply({PS: "127.0.0.1:2"}))).result(LIMIT)
    assert ClusterChanges.wait_ended(LIMIT)
    jobs = [{job.name for job in definition.cluster.job} for definition in begun]
    assert jobs == [{"chief", "ps", "worker"}, {"chief"}]


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_servers_that_hold_up_a_change_are_named(new_changes, caplog, is_silent):
    first, second = free_addresses(2)
    changes = new_changes()
    with StatusService(first, lambda: encoded_device(CPU, 1)), contextlib.ExitStack() as opened:
        if is_silent:
            # It accepts connections, and says nothing, as a frozen server does.
            opened.enter_context(socket.create_server(("127.0.0.1", int(second.rpartition(":")[2]))))
        else:
            opened.enter_context(StatusService(second, lambda: encoded_device(CPU, 2)))
        changes.addresses = {FIRST: first, SECOND: second}
        check_too_long(changes, {})
    expected = f"{second} did not answer" if is_silent else f"{first}, {second} did not end this client's calls"
    assert caplog.records[0].getMessage().startswith(expected)


def test_a_shortened_timeout_applies_to_a_change_in_progress(endless, new_changes, monkeypatch):
    monkeypatch.setattr(cluster_change, "PATIENCE_AT_CLOSE", 0.05)
    changes = new_changes(patience=1000.0)
    waiting = on_own_thread("patient-change", lambda: changes.apply({}))
    wait_until(lambda: endless[1])
    assert changes.hurry() == 0.25
    with pytest.raises(tf.errors.DeadlineExceededError):
        waiting.result(LIMIT)


def test_a_bounded_call_returns_raises_or_is_abandoned():
    assert call_within(LIMIT, "some-thread", lambda: threading.current_thread().name) == "some-thread"
    with pytest.raises(ZeroDivisionError):
        call_within(LIMIT, "some-thread", lambda: 1 // 0)
    may_return = threading.Event()
    with pytest.raises(TimeoutError, match=r"has not returned in 0\.01 s"):
        call_within(0.01, "some-thread", may_return.wait)
    may_return.set()


def test_calls_of_one_thread_are_made_in_order_and_none_after_its_end():
    thread, may_return, made = CallThread("coordinator-calls"), threading.Event(), []
    first = thread.begin(lambda: may_return.wait(LIMIT) and made.append(threading.get_ident()))
    failing = thread.begin(lambda: made.index("missing"))
    last = thread.begin(lambda: made.append(threading.get_ident()))
    thread.end()
    with pytest.raises(tf.errors.CancelledError):
        thread.begin(made.clear)
    may_return.set()
    first.result(LIMIT)
    with pytest.raises(ValueError, match="missing"):
        failing.result(LIMIT)
    last.result(LIMIT)
    assert len(made) == 2
    assert len({*made, threading.get_ident()}) == 2
