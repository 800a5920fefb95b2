"""Generators of `tf.data.Dataset.from_generator` run in the client and may wait. Closing does not wait for them."""

import threading
from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.membership import cluster_change
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges
from coordinator.ps_strategy.membership.cluster_definition import Task
from tests.deadline import wait_until
from tests.ps_strategy.failure_programs import waiting_generator

TIMEOUT = 60.0


@pytest.fixture
def endless_change(monkeypatch):
    """Has TensorFlow's next change of the cluster last until the event that this returns is set."""
    may_end, begun = threading.Event(), []

    def wait(definition, client_timeout):
        begun.append(definition)
        assert may_end.wait(TIMEOUT)

    monkeypatch.setattr(tensorflow_internals, "update_server_def", wait)
    yield may_end, begun
    may_end.set()


def test_a_change_that_does_not_end_raises_and_the_next_one_waits_for_it(endless_change, caplog):
    may_end, begun = endless_change
    changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=0.05)
    server, leaving, staying = Task("ps", 0), Task("worker", 0), Task("worker", 1)
    changes.named = {server: "127.0.0.1:2", leaving: "127.0.0.1:3", staying: "127.0.0.1:4"}
    left = {server: "127.0.0.1:2", staying: "127.0.0.1:4"}
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.make(left)
    assert [record.args[0] for record in caplog.records if record.args] == ["127.0.0.1:3"], (
        "those that stay are not disturbed"
    )
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.make({})
    assert len(begun) == 1, "one change at a time"
    may_end.set()
    changes.make(left)
    assert len(begun) == 2
    assert changes.named == left
    may_end.clear()
    caplog.clear()
    with pytest.raises(tf.errors.DeadlineExceededError):
        changes.make({})
    assert [record.args[0] for record in caplog.records if record.args] == ["127.0.0.1:4", "127.0.0.1:2"], (
        "workers first"
    )
    may_end.set()
    changes.close()


def test_a_change_waits_for_one_of_another_strategy(endless_change):
    may_end, begun = endless_change
    first, second = (ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=0.05) for _ in range(2))
    for changes in (first, second):
        with pytest.raises(tf.errors.DeadlineExceededError):
            changes.make({})
    assert len(begun) == 1, "one change at a time"
    may_end.set()
    second.make({})
    assert len(begun) == 2
    second.close()
    first.close()


def test_less_patience_holds_for_a_change_that_is_waited_for(endless_change, monkeypatch):
    monkeypatch.setattr(cluster_change, "PATIENCE_AT_CLOSE", 0.05)
    may_end, begun = endless_change
    changes = ClusterChanges("grpc", "127.0.0.1:1", 600.0, patience=1000.0)
    waiting = on_own_thread("patient-change", lambda: changes.make({}))
    wait_until(lambda: begun)
    assert changes.hurry() == 0.25
    with pytest.raises(tf.errors.DeadlineExceededError):
        waiting.result(TIMEOUT)
    may_end.set()
    changes.make({})
    changes.close()


@pytest.mark.cluster
@pytest.mark.parametrize(
    "ending",
    [pytest.param(name, marks=() if name == "close" else pytest.mark.long) for name in waiting_generator.ENDINGS],
)
def test_a_strategy_ends_while_generators_wait(run_program, ending):
    program = run_program(Path(waiting_generator.__file__).read_text(), ending, timeout=120)
    assert "ended" in program.stdout
