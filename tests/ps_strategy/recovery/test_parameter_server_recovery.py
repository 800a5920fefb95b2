"""Parameter servers that are lost come back with what the latest checkpoint holds; no function is traced again.

what is lost, and when                       what is restored
one parameter server                         the newest checkpoint
both                                         the same
one; another while the first is recovered    the same, after an attempt in vain
one, and the newest checkpoint is damaged    the one before
one, while a checkpoint is saved             the newest that is complete; then it is saved
one                                          what a function of the user's restores
one, before any checkpoint                   the initial values
"""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_recovery import ParameterServerRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import parameter_server_recoveries
from tests.ps_strategy.failure_programs.parameter_server_recoveries import STEPS

# Servers of a real cluster are started again a dozen times, on a machine that may have little to spare.
PROGRAM_TIMEOUT = 380
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

RECOVERED = {
    "one": ["/job:ps/task:0"],
    "both": ["/job:ps/task:0", "/job:ps/task:1"],
    "lost again on the way": ["/job:ps/task:0", "/job:ps/task:1"],
    "a damaged checkpoint": ["/job:ps/task:1"],
    "by a function": ["/job:ps/task:0"],
}
# From servers that answer to variables that are back; some two seconds on an idle machine.
SOON = 30.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """What came of each case; one program makes them all happen, on one cluster, with one strategy."""
    run_program = ProgramRunner(tmp_path_factory.mktemp("programs"))
    program = run_program(Path(parameter_server_recoveries.__file__).read_text(), timeout=PROGRAM_TIMEOUT)
    return {**json.loads(program.stdout.splitlines()[-1]), "errors": program.stderr}


@pytest.mark.cluster
@pytest.mark.parametrize("case", RECOVERED)
def test_variables_are_those_of_the_checkpoint(seen, case):
    assert seen[case]["values are those of the checkpoint"]
    assert seen[case]["rolled back"]["checkpoint"] == seen[case]["saved"]


@pytest.mark.cluster
@pytest.mark.parametrize("case", RECOVERED)
def test_variables_that_no_checkpoint_holds_begin_anew_on_every_server(seen, case):
    assert seen[case]["rest"] == [5, 6, 0.0]


@pytest.mark.cluster
@pytest.mark.parametrize("case", RECOVERED)
def test_functions_go_on_untraced_on_the_workers_and_on_the_client(seen, case):
    assert seen[case]["outputs are those of the checkpoint"]
    after = seen[case]["rolled back"]["step_after"] + STEPS
    assert seen[case]["step after training on"] == [after, after, str(after), str(after)], seen["errors"]
    assert seen[case]["traced again"] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("case", RECOVERED)
def test_it_is_told_what_was_lost_and_how_far_back_it_went(seen, case):
    rolled_back = seen[case]["rolled back"]
    assert rolled_back["parameter_servers"] == RECOVERED[case]
    assert rolled_back["seconds"] > 0
    expected = None if case == "by a function" else rolled_back["step_after"] + STEPS
    if case == "a damaged checkpoint":
        # What was trained between the two checkpoints counts too: it was done, and is lost.
        expected += STEPS
    assert rolled_back["step_before"] == expected


@pytest.mark.cluster
@pytest.mark.parametrize("case", RECOVERED)
def test_nothing_is_recovered_while_a_server_is_away(seen, case):
    assert seen[case]["while away"] is None


@pytest.mark.cluster
def test_a_server_that_is_lost_on_the_way_makes_the_attempt_one_in_vain(seen):
    assert set(seen["lost again on the way"]["attempts in vain"]) == {None}


@pytest.mark.cluster
def test_a_save_that_a_lost_server_broke_is_made_again(seen):
    saving = seen["while saving"]
    assert saving["saved"] == saving["latest"]
    assert saving["is complete"]


@pytest.mark.cluster
def test_a_function_of_the_users_finds_initial_values(seen):
    assert seen["by a function"]["seen by the function"] == [5, 6]


@pytest.mark.cluster
def test_before_any_checkpoint_training_begins_anew(seen):
    case = seen["without a checkpoint"]
    assert case["step"] == 0
    assert case["rolled back"]["checkpoint"] is None
    assert case["rolled back"]["step_after"] == 0
    assert case["rolled back"]["step_before"] > 0


@pytest.mark.cluster
def test_many_variables_are_back_soon(seen):
    assert seen["many variables"]["right"]
    assert seen["many variables"]["seconds"] < SOON


@pytest.mark.cluster
def test_what_is_dropped_meanwhile_raises_nothing(seen):
    assert "Traceback" not in seen["errors"], seen["errors"]
    assert "Exception ignored" not in seen["errors"], seen["errors"]


def new_recovery(runtime=None, finished=lambda: 0) -> ParameterServerRecovery:
    return ParameterServerRecovery(runtime, VariableStore(), finished, lambda timeout: False)


def test_without_a_source_nothing_can_be_recovered():
    with pytest.raises(RuntimeError, match="call restore_from first"):
        new_recovery().recover()


def test_a_manager_that_is_replaced_gets_its_own_save_back(tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(step=tf.Variable(1)), str(tmp_path), max_to_keep=1)
    recovery = new_recovery(runtime=Runtime())
    recovery.restore_from(manager)
    recovery.restore_from(manager)
    assert type(manager.save).__name__ == "GuardedSave"
    recovery.restore_from(lambda: None)
    assert type(manager.save).__name__ == "method"
    assert manager.save(options=tf.train.CheckpointOptions(enable_async=True))
    manager.checkpoint.sync()


@pytest.mark.parametrize("step", ["10", 10, tf.constant(1.0), object()], ids=["text", "number", "no integer", "object"])
def test_a_step_that_cannot_be_read_is_refused(step):
    with pytest.raises(TypeError, match="step must be an integer variable"):
        new_recovery().restore_from(lambda: None, step=step)


class Runtime:
    """Parameter servers that answer, unless the test says which do not."""

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


def test_workers_reach_recovered_servers_before_anything_goes_on():
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
    # Servers that only did not answer for a while may have been out of a worker's reach too.
    assert recovery.try_once()
    assert runtime.reached == [True, True]


def test_no_attempt_is_made_while_a_checkpoint_is_saved():
    runtime, restored = Runtime(), []
    recovery = new_recovery(runtime)
    recovery.restore_from(lambda: restored.append(1))
    runtime.lost = ["/job:ps/task:0"]
    with recovery.hold_off():
        assert recovery.recover() is None
    assert not restored
    rolled_back = recovery.recover()
    assert rolled_back is not None
    assert rolled_back.parameter_servers == ("/job:ps/task:0",)
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
    assert "not yet all variables" in str(recovery.missing())
    with pytest.raises(ValueError, match="the user's own"):
        recovery.recover()
    assert recovery.recover() is not None
    assert recovery.missing() is None
