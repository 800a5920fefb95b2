"""Parameter servers die, freeze or move: an error names them, or they are recovered while a plain loop trains."""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import lost_servers, parameter_server_recoveries

pytestmark = pytest.mark.cluster


# rows 81, 90, 91, 92, 93, 94, 95, 97.
def test_callers_are_told_which_server_died_and_can_continue(run_program: ProgramRunner) -> None:
    run_program(Path(lost_servers.__file__).read_text(), timeout=280)


@pytest.mark.long
@pytest.mark.timeout(690)
def test_a_loop_without_failure_handling_trains_on_after_each_loss(run_program: ProgramRunner) -> None:
    errors = run_program(Path(parameter_server_recoveries.__file__).read_text(), timeout=680).stderr
    # Objects that are deleted during a recovery raise nothing.
    assert "Traceback" not in errors, errors
    assert "Exception ignored" not in errors, errors
