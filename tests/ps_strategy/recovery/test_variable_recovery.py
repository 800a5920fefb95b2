"""Tests of single attempts to recover, on fake parameter servers without remote calls."""

import contextlib

import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions


class Servers:
    """Parameter servers that answer, except those that a test makes silent, and the recovery of their variables."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.answer = True
        self.reached: list[bool] = []
        self.restored: list[int] = []
        store = VariableStore(TracedFunctions())
        self.recovery = VariableRecovery(self, store, lambda: 0, lambda: False, contextlib.nullcontext)

    def restore(self) -> None:
        self.restored.append(1)

    def lost_parameter_servers(self):
        return tuple(self.lost)

    def lost_parameter_server(self):
        return RuntimeError("lost") if self.lost else None

    def reconnect_parameter_servers(self):
        if self.answer:
            self.lost = []
        return self.answer

    def reach_parameter_servers(self):
        self.reached.append(not self.lost)


@pytest.fixture
def servers() -> Servers:
    return Servers()


def test_without_a_source_nothing_can_be_recovered_and_a_wrong_step_is_refused(servers):
    with pytest.raises(RuntimeError, match="call restore_from first"):
        servers.recovery.recover()
    for step in ("10", 10, tf.constant(1.0), object()):
        with pytest.raises(TypeError, match="step must be an integer variable"):
            servers.recovery.restore_from(servers.restore, step=step)


def test_a_server_that_was_only_slow_to_answer_is_not_recovered(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost, servers.answer = ["/job:ps/task:0"], False
    assert servers.recovery.recover() is None
    servers.lost = []
    assert servers.recovery.recover() is None
    assert servers.recovery.missing() is None
    assert not servers.restored


def test_workers_reach_recovered_servers_before_work_continues(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost, servers.answer = ["/job:ps/task:0"], False
    assert not servers.recovery.try_once()
    assert not servers.reached
    servers.answer = True
    assert servers.recovery.try_once()
    assert (servers.restored, servers.reached) == ([1], [True])
    # Servers that did not answer for a while may have been unreachable for a worker too.
    assert servers.recovery.try_once()
    assert servers.reached == [True, True]


def test_no_attempt_is_made_while_a_checkpoint_is_saved(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost = ["/job:ps/task:0"]
    with servers.recovery.variables_in_use:
        assert servers.recovery.recover() is None
    assert not servers.restored
    assert servers.recovery.recover().parameter_servers == ("/job:ps/task:0",)
    assert servers.restored


def test_variables_are_missing_until_an_attempt_succeeds(servers):
    errors = iter([tf.errors.UnavailableError(None, None, "Connection refused"), ValueError("the user's own")])

    def restore():
        for error in errors:
            raise error

    servers.recovery.restore_from(restore)
    servers.lost = ["/job:ps/task:1"]
    assert servers.recovery.recover() is None
    assert servers.lost == []
    assert "its variables are being restored" in str(servers.recovery.missing())
    with pytest.raises(ValueError, match="the user's own"):
        servers.recovery.recover()
    assert servers.recovery.recover() is not None
    assert servers.recovery.missing() is None
