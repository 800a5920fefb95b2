"""Tests of the check whether a parameter server still has its variables, on real servers."""

import types

import pytest
import tensorflow as tf

from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.handshake import SentinelVariables

LONGEST_CALL = 10.0

# While it is frozen, TensorFlow's connection to it is cut off, and retried without success; when it thaws, the
# next attempt may be a second away.
THAWED = """
import threading

import tensorflow as tf

import coordinator
from coordinator.ps_strategy.tensorflow_internals.functions import own_executor
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

options = coordinator.Options(heartbeat_interval=0.2, heartbeat_timeout=2.0)
with LocalCluster(workers=2, ps=1) as cluster:
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=options)
    [server] = strategy.parameter_servers
    with strategy.scope():
        variable = tf.Variable(3.0)

    def is_read():
        with own_executor():
            try:
                return variable.numpy() == 3.0
            except tf.errors.UnavailableError:
                return False

    stop = threading.Event()

    def read_on():
        while not stop.wait(0.05):
            is_read()

    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    for change in (strategy.cluster.remove_worker, strategy.cluster.add_worker):
        cluster.freeze("ps", 0)
        wait_until(lambda: not server.healthy())
        cluster.thaw("ps", 0)
        wait_until(server.healthy)
        change(1 if change == strategy.cluster.remove_worker else cluster.spec["worker"][1])
        # A server that freezes during a change does lose its variables.
        wait_until(lambda: all(worker.healthy() for worker in strategy.cluster.workers))
        wait_until(is_read)
        # Not at once: that it was silent may be known only after it has answered again.
        wait_until(server.healthy)
    stop.set()
    reader.join()
    strategy.close()
"""


@pytest.mark.long
@pytest.mark.cluster
def test_a_thawed_server_keeps_its_variables_through_cluster_changes(run_program):
    run_program(THAWED, timeout=200)


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
