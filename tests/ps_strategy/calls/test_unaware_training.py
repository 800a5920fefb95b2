"""Parameter servers are lost while a plain loop trains: the loop sees nothing but the delay.

which servers are lost                          what the loop sees    what its callback gets
one parameter server                            nothing               that one, and how many steps were lost
both                                            nothing               both
one, and a worker                               nothing               that one
one, while a checkpoint is saved                nothing               that one
one, and another time while it is recovered     nothing               those
one freezes and thaws while a worker dies       nothing               nothing: its variables are still there
"""

import json
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import unaware_training
from tests.ps_strategy.failure_programs.unaware_training import CASES

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

LOST = {
    "one": {"/job:ps/task:0"},
    "both": {"/job:ps/task:0", "/job:ps/task:1"},
    "one and a worker": {"/job:ps/task:1"},
    "one during a save": {"/job:ps/task:0"},
    "one again during its recovery": {"/job:ps/task:0"},
}


@pytest.fixture(scope="module")
def seen(interpreter, tmp_path_factory) -> dict:
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))
    program = run_program(Path(unaware_training.__file__).read_text(), timeout=580)
    return json.loads(program.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_training_continues_and_the_callback_gets_what_was_lost(seen, case):
    assert LOST[case] <= set(seen[case]["servers"]), seen[case]
    assert all(seen[case]["checkpoints"])
    assert all(0 <= steps <= 3 * unaware_training.STEPS for steps in seen[case]["steps lost"]), seen[case]


def test_the_loop_saw_no_error_and_traced_once(seen):
    assert seen["errors"] == []
    assert seen["traces"] == 1


def test_a_frozen_server_keeps_its_variables_although_a_worker_dies(seen):
    assert seen["frozen"] == {"rollbacks": 0}


def test_the_restored_model_is_of_one_version(seen):
    assert seen["iterations"] > 0
    # The counts are on two servers; a step whose worker died may have incremented only one before it ran again.
    assert abs(seen["iterations"] - seen["steps"]) <= seen["retried since the last restoration"], seen
