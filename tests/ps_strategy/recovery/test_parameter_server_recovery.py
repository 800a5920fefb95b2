"""Lost parameter servers are recovered from the latest checkpoint; no function is traced again.

what is lost, and when                       what is restored
one parameter server                         the newest checkpoint
both                                         the same
one; another while the first is recovered    the same, after a failed attempt
one, and the newest checkpoint is damaged    the one before
one, while a checkpoint is saved             the newest that is complete; then it is saved
one                                          what the user's function restores
one, before any checkpoint                   the initial values
"""

import json
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import parameter_server_recoveries
from tests.ps_strategy.failure_programs.parameter_server_recoveries import STEPS

# Servers of a real cluster are restarted a dozen times, on a machine that may be busy.
PROGRAM_TIMEOUT = 380
pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

RECOVERED = {
    "one": ["/job:ps/task:0"],
    "both": ["/job:ps/task:0", "/job:ps/task:1"],
    "lost again during the recovery": ["/job:ps/task:0", "/job:ps/task:1"],
    "a damaged checkpoint": ["/job:ps/task:1"],
    "by a function": ["/job:ps/task:0"],
}
# In seconds, from the answer of the servers to the restored variables; about two seconds on an idle machine.
SOON = 30.0


@pytest.fixture(scope="module")
def seen(interpreter, tmp_path_factory) -> dict:
    """The outcome of each case; one program runs them all, on one cluster, with one strategy."""
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))
    program = run_program(Path(parameter_server_recoveries.__file__).read_text(), timeout=PROGRAM_TIMEOUT)
    return {**json.loads(program.stdout.splitlines()[-1]), "errors": program.stderr}


@pytest.mark.parametrize("case", RECOVERED)
def test_variables_are_those_of_the_checkpoint(seen, case):
    assert seen[case]["values are those of the checkpoint"]
    assert seen[case]["rolled back"]["checkpoint"] == seen[case]["saved"]


@pytest.mark.parametrize("case", RECOVERED)
def test_variables_in_no_checkpoint_have_initial_values_on_every_server(seen, case):
    assert seen[case]["rest"] == [5, 6, 0.0]


@pytest.mark.parametrize("case", RECOVERED)
def test_tables_in_no_checkpoint_have_their_initial_content(seen, case):
    assert seen[case]["found in the tables"] == [[1, -1]] * 2


@pytest.mark.parametrize("case", RECOVERED)
def test_functions_are_not_retraced_on_the_workers_or_the_client(seen, case):
    assert seen[case]["outputs are those of the checkpoint"]
    after = seen[case]["rolled back"]["step_after"] + STEPS
    # A step that a lost connection ended is run again, and may have changed some of the variables before.
    possible = range(after, after + seen[case]["retried"] + 1)
    assert all(int(step) in possible for step in seen[case]["step after training on"]), seen["errors"]
    assert seen[case]["traced again"] == 0


@pytest.mark.parametrize("case", RECOVERED)
def test_a_rollback_says_what_was_lost_and_how_many_steps(seen, case):
    rolled_back = seen[case]["rolled back"]
    assert rolled_back["parameter_servers"] == RECOVERED[case]
    assert rolled_back["seconds"] > 0
    expected = None if case == "by a function" else rolled_back["step_after"] + STEPS
    if case == "a damaged checkpoint":
        # The steps between the two checkpoints count too: they were run, and are lost.
        expected += STEPS
    assert rolled_back["step_before"] == expected


@pytest.mark.parametrize("case", RECOVERED)
def test_nothing_is_recovered_while_a_server_is_down(seen, case):
    assert seen[case]["while away"] is None


def test_a_server_that_is_lost_during_a_recovery_makes_the_attempt_fail(seen):
    assert set(seen["lost again during the recovery"]["failed attempts"]) == {None}


def test_a_save_that_a_lost_server_made_fail_is_repeated(seen):
    saving = seen["while saving"]
    assert saving["saved"] == saving["latest"]
    assert saving["is complete"]


def test_a_custom_restore_function_gets_initial_values(seen):
    assert seen["by a function"]["seen by the function"] == [5, 6]


def test_without_a_checkpoint_training_restarts_from_initial_values(seen):
    case = seen["without a checkpoint"]
    assert case["step"] == 0
    assert case["rolled back"]["checkpoint"] is None
    assert case["rolled back"]["step_after"] == 0
    assert case["rolled back"]["step_before"] > 0


def test_many_variables_are_recovered_quickly(seen):
    assert seen["many variables"]["right"]
    assert seen["many variables"]["seconds"] < SOON


def test_objects_deleted_during_a_recovery_raise_nothing(seen):
    assert "Traceback" not in seen["errors"], seen["errors"]
    assert "Exception ignored" not in seen["errors"], seen["errors"]
