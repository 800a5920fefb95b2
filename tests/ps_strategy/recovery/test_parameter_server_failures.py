"""Parameter servers die: an error names them within seconds, and a new strategy continues from a checkpoint.

which tasks die            when                      what join, schedule and the futures raise
one parameter server       while functions run       ParameterServerLost, which names it
one, restarted at once     between two calls         the same: it answers, but its variables are gone
every parameter server     between two calls         the same; the first one is named
one and a worker           while functions run       the same, whichever is noticed first
one and every worker       while functions run       the same
"""

import json
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import parameter_server_losses
from tests.ps_strategy.failure_programs.parameter_server_losses import CASES, STEPS

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# On an idle machine it takes well under a second; an unanswered probe takes five.
SOON = 30.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """What the caller saw in each case; one program runs them all, on one cluster."""
    run_program = ProgramRunner(tmp_path_factory.mktemp("programs"))
    program = run_program(Path(parameter_server_losses.__file__).read_text(), timeout=280)
    return json.loads(program.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_join_raises_an_error_that_names_the_lost_parameter_server(seen, case):  # rows 90, 91, 93, 94, 95
    index = CASES[case].lost[0][1]
    for join in (seen[case]["join"], seen[case]["join again"]):
        assert join["raised"] == "ParameterServerLost", join
        assert join["task"] == f"/job:ps/task:{index}"
        assert join["seconds"] < SOON
    # The futures raise nothing else: a function that did not encounter the loss itself was withdrawn.
    assert "ParameterServerLost" in seen[case]["outcomes"]
    assert set(seen[case]["outcomes"]) <= {"ParameterServerLost", "ClosureCancelledError"}


@pytest.mark.parametrize("case", CASES)
def test_schedule_raises_an_error_that_names_the_lost_parameter_server(seen, case):  # row 92
    assert seen[case]["schedule"]["raised"] == "ParameterServerLost"
    assert seen[case]["schedule"]["seconds"] < SOON


@pytest.mark.parametrize("case", CASES)
def test_a_lost_parameter_server_is_unhealthy_and_the_others_are_not(seen, case):  # row 97
    assert seen[case]["healthy"] == [("ps", index) not in CASES[case].lost for index in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_closing_with_a_lost_parameter_server_is_quick(seen, case):
    assert seen[case]["close"]["raised"] is None
    assert seen[case]["close"]["seconds"] < SOON


def test_a_new_strategy_in_the_same_process_continues_from_the_checkpoint(seen):
    resumed = [seen[case]["resumed"] for case in (*CASES, "afterwards")]
    assert resumed == [[STEPS * made] * 2 for made in (*range(len(CASES)), len(CASES) + 1)]
    assert seen["afterwards"]["healthy"] == [True, True]
