"""Parameter servers die: an error names them within seconds, and a new strategy continues from a checkpoint.

which tasks die            when                      what join, schedule and the futures raise
one parameter server       while functions run       ParameterServerLost, which names it
one, restarted at once     between two calls         the same: it answers, but its variables are gone
every parameter server     between two calls         the same; the first one is named
one and a worker           while functions run       the same, whichever is noticed first
one and every worker       while functions run       the same
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import parameter_server_losses
from tests.ps_strategy.failure_programs.parameter_server_losses import CASES, STEPS

pytestmark = pytest.mark.cluster

# On an idle machine it takes well under a second; an unanswered probe takes five.
SOON = 30.0
DEFAULT = ("one, while functions run", "all, between two calls", "one and a worker, while functions run")
LONG = tuple(case for case in CASES if case not in DEFAULT)
each_case = pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])


@pytest.fixture(scope="module")
def observed(interpreter, tmp_path_factory) -> Callable[[tuple[str, ...]], dict]:
    """Returns what the caller saw in some cases; one program runs them, on one cluster."""
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))

    @functools.cache
    def observed(cases: tuple[str, ...]) -> dict:
        program = run_program(Path(parameter_server_losses.__file__).read_text(), *cases, timeout=280)
        return json.loads(program.stdout.splitlines()[-1])

    return observed


@pytest.fixture
def seen(observed, case) -> dict:
    """What the caller saw in a case."""
    return observed(DEFAULT if case in DEFAULT else LONG)[case]


@each_case
def test_join_raises_an_error_that_names_the_lost_parameter_server(seen, case):  # rows 90, 91, 93, 94, 95
    index = CASES[case].lost[0][1]
    for join in (seen["join"], seen["join again"]):
        assert join["raised"] == "ParameterServerLost", join
        assert join["task"] == f"/job:ps/task:{index}"
        assert join["seconds"] < SOON
    # The futures raise nothing else: a function that did not encounter the loss itself was withdrawn.
    assert "ParameterServerLost" in seen["outcomes"]
    assert set(seen["outcomes"]) <= {"ParameterServerLost", "ClosureCancelledError"}


@each_case
def test_schedule_raises_an_error_that_names_the_lost_parameter_server(seen, case):  # row 92
    assert seen["schedule"]["raised"] == "ParameterServerLost"
    assert seen["schedule"]["seconds"] < SOON


@each_case
def test_a_lost_parameter_server_is_unhealthy_and_the_others_are_not(seen, case):  # row 97
    assert seen["healthy"] == [("ps", index) not in CASES[case].lost for index in (0, 1)]


@each_case
def test_closing_with_a_lost_parameter_server_is_quick(seen, case):
    assert seen["close"]["raised"] is None
    assert seen["close"]["seconds"] < SOON


@pytest.mark.parametrize("cases", [DEFAULT, pytest.param(LONG, marks=pytest.mark.long)])
def test_a_new_strategy_in_the_same_process_continues_from_the_checkpoint(observed, cases):
    seen = observed(cases)
    resumed = [seen[case]["resumed"] for case in (*cases, "afterwards")]
    assert resumed == [[STEPS * made] * 2 for made in (*range(len(cases)), len(cases) + 1)]
    assert seen["afterwards"]["healthy"] == [True, True]
