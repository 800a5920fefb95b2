"""Tests of single attempts to recover, on fake parameter servers without remote calls."""

import contextlib

import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions


def new_recovery(runtime=None, finished=lambda: 0) -> VariableRecovery:
    return VariableRecovery(runtime, VariableStore(TracedFunctions()), finished, lambda: False, contextlib.nullcontext)


def test_without_a_source_nothing_can_be_recovered():
    with pytest.raises(RuntimeError, match="call restore_from first"):
        new_recovery().recover()


def test_a_replaced_manager_gets_its_original_save_method_back(tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(step=tf.Variable(1)), str(tmp_path), max_to_keep=1)
    recovery = new_recovery(runtime=Runtime())
    recovery.restore_from(manager)
    recovery.restore_from(manager)
    assert "save" in vars(manager)
    recovery.restore_from(lambda: None)
    assert "save" not in vars(manager)
    assert manager.save(options=tf.train.CheckpointOptions(enable_async=True))
    manager.checkpoint.sync()


@pytest.mark.parametrize("step", ["10", 10, tf.constant(1.0), object()], ids=["text", "number", "no integer", "object"])
def test_a_step_that_cannot_be_read_is_refused(step):
    with pytest.raises(TypeError, match="step must be an integer variable"):
        new_recovery().restore_from(lambda: None, step=step)


class Runtime:
    """Parameter servers that answer, except those that a test makes silent."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.answer = True
        self.reached: list[bool] = []

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


def test_a_server_that_was_only_slow_to_answer_is_not_recovered():
    runtime, restored = Runtime(), []
    recovery = new_recovery(runtime)
    recovery.restore_from(lambda: restored.append(1))
    runtime.lost, runtime.answer = ["/job:ps/task:0"], False
    assert recovery.recover() is None
    runtime.lost = []
    assert recovery.recover() is None
    assert recovery.missing() is None
    assert not restored


def test_workers_reach_recovered_servers_before_work_continues():
    runtime, events = Runtime(), []
    recovery = new_recovery(runtime)
    recovery.restore_from(lambda: events.append("restored"))
    runtime.lost, runtime.answer = ["/job:ps/task:0"], False
    assert not recovery.try_once()
    assert not runtime.reached
    runtime.answer = True
    assert recovery.try_once()
    assert events == ["restored"]
    assert runtime.reached == [True]
    # Servers that did not answer for a while may have been unreachable for a worker too.
    assert recovery.try_once()
    assert runtime.reached == [True, True]


def test_no_attempt_is_made_while_a_checkpoint_is_saved():
    runtime, restored = Runtime(), []
    recovery = new_recovery(runtime)
    recovery.restore_from(lambda: restored.append(1))
    runtime.lost = ["/job:ps/task:0"]
    with recovery.variables_in_use:
        assert recovery.recover() is None
    assert not restored
    rollback = recovery.recover()
    assert rollback is not None
    assert rollback.parameter_servers == ("/job:ps/task:0",)
    assert restored


def test_variables_are_missing_until_an_attempt_succeeds():
    runtime = Runtime()
    recovery = new_recovery(runtime)
    errors = iter([tf.errors.UnavailableError(None, None, "Connection refused"), ValueError("the user's own")])

    def restore():
        for error in errors:
            raise error

    recovery.restore_from(restore)
    runtime.lost = ["/job:ps/task:1"]
    assert recovery.recover() is None
    assert runtime.lost == []
    assert "its variables are being restored" in str(recovery.missing())
    with pytest.raises(ValueError, match="the user's own"):
        recovery.recover()
    assert recovery.recover() is not None
    assert recovery.missing() is None
