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

from tests.ps_strategy.failure_programs import moved_parameter_server, parameter_server_losses
from tests.ps_strategy.failure_programs.parameter_server_losses import CASES, STEPS

pytestmark = pytest.mark.cluster

# On an idle machine it takes well under a second; an unanswered probe takes five.
SOON = 30.0
DEFAULT = ("one, while functions run", "all, between two calls", "one and a worker, while functions run")
LONG = tuple(case for case in CASES if case not in DEFAULT)


# One test for all: its program would run twice if two processes had a part of it each.
@pytest.mark.parametrize("cases", [DEFAULT, pytest.param(LONG, marks=pytest.mark.long)], ids=["some", "others"])
def test_callers_are_told_which_server_died_and_can_continue(run_program, cases):  # rows 90, 91, 92, 93, 94, 95, 97
    program = run_program(Path(parameter_server_losses.__file__).read_text(), *cases, timeout=280)
    seen = json.loads(program.stdout.splitlines()[-1])
    for case in cases:
        check_errors(case, seen[case])
        # Closing with a lost parameter server is quick.
        assert seen[case]["close"]["raised"] is None, case
        assert seen[case]["close"]["seconds"] < SOON, case
        assert seen[case]["healthy"] == [("ps", index) not in CASES[case].lost for index in (0, 1)], case
    # A new strategy in the same process continues from the checkpoint.
    resumed = [seen[case]["resumed"] for case in (*cases, "afterwards")]
    assert resumed == [[STEPS * made] * 2 for made in (*range(len(cases)), len(cases) + 1)]
    assert seen["afterwards"]["healthy"] == [True, True]


def check_errors(case, seen):
    """Checks that `join`, `schedule` and the futures raised what they must, soon."""
    index = CASES[case].lost[0][1]
    for join in (seen["join"], seen["join again"], seen["create"]):
        assert join["raised"] == "ParameterServerLost", (case, join)
        assert join["task"] == f"/job:ps/task:{index}", case
        assert join["seconds"] < SOON, case
        assert f"ParameterServerLost: The parameter server /job:ps/task:{index} was lost (127." in join["traceback"]
        assert "GRPC" not in join["traceback"], "TensorFlow's text is logged at DEBUG"
    assert seen["schedule"]["raised"] == "ParameterServerLost", case
    assert seen["schedule"]["seconds"] < SOON, case
    # The futures raise nothing else: a function that did not encounter the loss itself was withdrawn.
    assert "ParameterServerLost" in seen["outcomes"], case
    assert set(seen["outcomes"]) <= {"ParameterServerLost", "ClosureCancelledError"}, case


@pytest.mark.long
def test_a_parameter_server_moves_to_another_address_dead_or_alive(run_program):
    run_program(Path(moved_parameter_server.__file__).read_text(), timeout=280)
