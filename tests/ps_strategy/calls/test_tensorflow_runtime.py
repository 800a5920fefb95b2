"""Tests of which servers the runtime connects, on servers in a dictionary: no network, no remote calls."""

import gc
import itertools
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from coordinator.errors import ClosureInputError
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.probes import Link
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.runtime import FailureKind
from tests.ps_strategy.membership.fake_servers import ADDRESSES, FIRST, PS, SECOND, UNAVAILABLE, FakeSentinels

ALL = set(ADDRESSES)
STALE = tf.errors.InvalidArgumentError(None, None, "Unable to find a context_id")


class Work:
    """Records the numbers of the connections with which it runs, and fails on request."""

    def __init__(self, error: Exception | None = None, meanwhile=lambda: None) -> None:
        self.connections: list[int] = []
        self._error = error
        self._meanwhile = meanwhile

    def __call__(self, context) -> None:
        self.connections.append(context.connection_number)
        self._meanwhile()
        if self._error is not None:
            raise self._error


def attempt(membership, worker, work) -> FailureKind | None:
    """Runs `work`; returns the kind of its failure."""
    runtime = TensorFlowRuntime(membership)
    runtime.bind_thread(worker)
    try:
        runtime.run(worker, work, None)
    except tf.errors.OpError as error:
        return runtime.classify(worker, error).kind
    return None


@pytest.mark.parametrize(
    ("dead", "restarted", "error", "kind"),
    [
        ((), (), UNAVAILABLE, FailureKind.TRANSIENT),
        ((), (), STALE, FailureKind.USER),
        ((FIRST,), (), STALE, FailureKind.WORKER_LOST),
        ((), (FIRST,), STALE, FailureKind.WORKER_LOST),
        ((SECOND,), (), STALE, FailureKind.USER),
        ((PS,), (), UNAVAILABLE, FailureKind.PARAMETER_SERVER_LOST),
        ((), (PS,), STALE, FailureKind.PARAMETER_SERVER_LOST),
        ((PS, FIRST), (), UNAVAILABLE, FailureKind.PARAMETER_SERVER_LOST),
        ((FIRST,), (PS,), UNAVAILABLE, FailureKind.PARAMETER_SERVER_LOST),
    ],
)
def test_a_failure_is_classified_by_which_servers_answer(servers, connect, dead, restarted, error, kind):  # rows 78, 90
    membership = connect()

    def fail():
        for task in dead:
            servers.kill(task)
        for task in restarted:
            servers.restart(task)

    assert attempt(membership, 0, Work(error, meanwhile=fail)) is kind


LOST_OBJECTS = [
    STALE,
    tf.errors.NotFoundError(None, None, "Resource localhost/_AnonymousVar7/N10tensorflow3VarE"),
    tf.errors.FailedPreconditionError(None, None, "Error while reading resource variable v from Container: localhost."),
    tf.errors.InternalError(None, None, "Function __inference_step_7 not defined"),
]
OF_THE_FUNCTION = [
    tf.errors.InvalidArgumentError(None, None, "assertion failed: [x is negative]"),
    tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [2] vs. [3]"),
    tf.errors.NotFoundError(None, None, "KeyError: not found\nTraceback (most recent call last):\n"),
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor"),
    tf.errors.OutOfRangeError(None, None, "End of sequence"),
    ValueError("not found"),
]


@pytest.mark.parametrize("is_input", [False, True])
def test_only_errors_about_lost_objects_wait_for_the_end_of_a_change(servers, connect, monkeypatch, is_input):
    """The change has destroyed variables, which is known when it has ended."""
    membership = connect()
    runtime = TensorFlowRuntime(membership)
    # The change ends when it is waited for.
    change = SimpleNamespace(wait=lambda _: servers.restart(PS), set=lambda: None, clear=lambda: None)
    monkeypatch.setattr(membership, "settled", change)

    def kind(cause: Exception) -> FailureKind:
        error: Exception = ClosureInputError("a dataset") if is_input else cause
        if is_input:
            error.__cause__ = cause
        membership.begin_attempt(1)
        return runtime.classify(1, error).kind

    own = FailureKind.INPUT if is_input else FailureKind.USER
    assert [kind(error) for error in OF_THE_FUNCTION] == [own] * len(OF_THE_FUNCTION)
    for error in LOST_OBJECTS:
        assert kind(error) is FailureKind.PARAMETER_SERVER_LOST, error
        assert membership.reconnect_parameter_servers()


UNREACHED = Link(ADDRESSES[FIRST], ADDRESSES[PS])


def test_a_worker_that_does_not_reach_a_parameter_server_is_given_up(servers, connect, monkeypatch):
    shut_down = []
    monkeypatch.setattr(OpenConnections, "shut_down", lambda _, address: shut_down.append(address))
    membership = connect()
    assert (membership.broken_links([0, 1]), membership.separation()) == ({}, "")
    servers.cut.add(UNREACHED)
    words = "first:1 does not reach /job:ps/task:0 at ps:1: no answer for 5 s"
    assert membership.broken_links([0, 1]) == {0: words}

    def give_up():
        membership.give_up(0, words)

    assert attempt(membership, 0, Work(UNAVAILABLE, meanwhile=give_up)) is FailureKind.LINK_LOST
    assert shut_down == ["first:1"]
    assert (membership.seems_reachable(0), membership.seems_reachable(1)) == (False, True)
    assert membership.describe_loss(0) == words
    membership.disconnect(0)
    assert servers.server_defs[-1] == {PS, SECOND}
    assert not membership.reconnect(0), "it does not reach the parameter server"
    assert servers.server_defs[-1] == {PS, SECOND}
    servers.cut.clear()
    assert membership.reconnect(0)
    assert attempt(membership, 0, Work(UNAVAILABLE)) is FailureKind.TRANSIENT
    servers.kill(FIRST)
    assert attempt(membership, 0, Work(UNAVAILABLE)) is FailureKind.WORKER_LOST


def test_a_failed_attempt_is_classified_by_the_connection_that_it_began_with(servers, connect):
    membership = connect()
    servers.restart(SECOND)

    def both_return():
        servers.restart(FIRST)
        assert membership.reconnect(1)
        assert membership.is_reachable(0), "the return of the second worker renewed the connection to the first"

    before, after = Work(STALE, meanwhile=both_return), Work(STALE)
    assert attempt(membership, 0, before) is FailureKind.WORKER_LOST
    named = len(servers.server_defs)
    assert membership.reconnect(0)
    assert len(servers.server_defs) == named, "it is connected already"
    assert attempt(membership, 0, after) is FailureKind.USER
    assert before.connections != after.connections, "the resources of the server's first process are created again"


def test_a_worker_that_was_left_out_for_a_while_has_lost_its_resources(servers, connect):
    membership, work = connect(), Work()
    assert attempt(membership, 0, work) is None
    incarnation = servers.incarnations.pop(FIRST)
    servers.restart(SECOND)
    assert membership.reconnect(1)
    servers.incarnations[FIRST] = incarnation  # it was not restarted, only slow to answer
    assert attempt(membership, 0, work) is FailureKind.WORKER_LOST
    assert membership.reconnect(0)
    assert attempt(membership, 0, work) is None
    assert work.connections[0] != work.connections[1]


def test_parameter_servers_are_reconnected_when_they_answer_and_no_worker_before(servers, connect):
    membership, work = connect(), Work()
    assert attempt(membership, 0, work) is None
    servers.kill(PS)
    servers.kill(SECOND)
    assert membership.lost_parameter_servers() == ("/job:ps/task:0",)
    named = len(servers.server_defs)
    assert not membership.reconnect_parameter_servers()
    servers.restart(PS)
    assert not membership.reconnect(0)
    assert not membership.is_parameter_server_reachable(0)
    lost = membership.lost_parameter_server()
    assert (lost.task, "ps:1" in str(lost)) == ("/job:ps/task:0", True)
    assert membership.reconnect_parameter_servers()
    assert servers.server_defs[named:] == [{PS, FIRST}], "only servers that answer are connected"
    assert membership.lost_parameter_servers() == ()
    assert attempt(membership, 0, work) is None
    assert len(set(work.connections)) == 1, "workers keep their resources"


@pytest.mark.parametrize("missed", range(3))
def test_a_parameter_server_that_misses_one_probe_keeps_its_variables(servers, connect, monkeypatch, missed):
    """As one does that was frozen, and is slow after it has thawed."""
    membership, asked, state = connect(), itertools.count(), servers.state

    def seen(address):
        is_missed = address == ADDRESSES[PS] and next(asked) == missed
        return ServerState(Liveness.SILENT) if is_missed else state(address)

    named = len(servers.server_defs)
    monkeypatch.setattr(servers, "state", seen)
    assert any(membership.reconnect_parameter_servers() for _ in range(2))
    assert len(servers.server_defs) == named
    assert membership.lost_parameter_server() is None


def test_a_parameter_server_that_loses_its_variables_in_a_change_is_lost(servers, connect, monkeypatch):
    membership = connect()
    servers.restart(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(FakeSentinels, "lossy", True)
        membership.disconnect(0)
    assert membership.lost_parameter_servers() == ("/job:ps/task:0",), "although it answers, and was not restarted"
    assert not membership.is_reachable(1), "nor does a worker keep what it needs"
    assert not membership.seem_parameter_servers_reachable()
    assert membership.reconnect_parameter_servers()
    assert membership.lost_parameter_server() is None
    assert membership.reconnect(1)


def test_a_function_that_is_deleted_while_the_servers_change_is_removed_afterwards(servers, connect):
    membership, seen = connect(), []
    functions = [tf.function(lambda: tf.constant(3))]
    name = functions[0].get_concrete_function().name

    def delete(_):
        functions.clear()
        gc.collect()
        seen.append(context.context().has_function(name))

    servers.before_update = delete
    servers.restart(FIRST)
    assert membership.reconnect(0)
    assert seen[0], "TensorFlow would tell servers that are not connected"
    assert not context.context().has_function(name)


@pytest.mark.parametrize("why", ["silent", "unreached"])
def test_the_cluster_is_not_changed_while_a_parameter_server_is_silent_or_unreached(servers, connect, monkeypatch, why):
    """TensorFlow would treat the server as a new one and drop its variables, although it may only be slow."""
    membership = connect()
    named = len(servers.server_defs)
    servers.restart(FIRST)
    with monkeypatch.context() as patch:
        if why == "silent":
            servers.fall_silent(PS)
        else:
            # The server may answer a probe before TensorFlow retries its own connection, which was cut off.
            patch.setattr(FakeSentinels, "reachable", False)
        membership.disconnect(0)
        assert not membership.reconnect(0)
    assert len(servers.server_defs) == named
    servers.silent.clear()
    assert membership.lost_parameter_server() is None, "it still has its variables"
    assert membership.reconnect(0)
    assert servers.server_defs[named:] == [{PS, SECOND}, ALL], "resources of the former process are released first"


def test_closing_does_not_wait_for_a_change_that_hangs_and_connects_no_server(servers, connect, caplog, monkeypatch):
    membership = connect(heartbeat_interval=0.05, heartbeat_timeout=0.1)
    hanging, begun = threading.Event(), threading.Event()
    servers.restart(SECOND)

    def hang(*_):
        begun.set()
        hanging.wait()
        return {}

    monkeypatch.setattr(servers, "before_update", hang)
    thread = threading.Thread(target=membership.reconnect, args=(1,))
    thread.start()
    try:
        begun.wait()
        membership.close()
        assert "has not finished updating" in caplog.text
    finally:
        hanging.set()
        thread.join()
    named = len(servers.server_defs)
    assert not membership.reconnect(1)
    assert not membership.reconnect_parameter_servers()
    assert len(servers.server_defs) == named


# Two devices that any machine has.
WORKERS = [f"/job:worker/replica:0/task:{worker}/device:CPU:0" for worker in range(2)]


def test_work_is_told_which_device_of_its_worker_calls_functions(servers, connect):
    servers.with_gpu.add(FIRST)
    runtime = TensorFlowRuntime(connect())
    contexts = [runtime.run(worker, lambda context: context, None) for worker in range(2)]
    assert [context.device for context in contexts] == WORKERS
    assert [context.calling_device for context in contexts] == [WORKERS[0].replace("CPU", "GPU"), WORKERS[1]]
    assert [context.on_cpu.calling_device for context in contexts] == WORKERS
