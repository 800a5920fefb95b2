"""Parameter servers die: an error names them, or they are recovered while a plain loop trains.

what is lost, and when                             what join, schedule and the futures raise
a parameter server, restarted between two calls    ParameterServerLost: its variables are gone
every one and a worker, while functions run        the same; the first one is named
workers and all of them, while a client connects   nothing: it waits for them
                                                   what is restored, with `restore_from`
one parameter server, before any checkpoint        the initial values
both, and the newest checkpoint is damaged         the one before
one, and a worker                                  the newest checkpoint
one, while a checkpoint is saved                   the newest that is complete; then it is saved
one, and another one while the first is recovered  the newest checkpoint, after a failed attempt
one freezes and thaws while a worker dies          nothing: its variables are still there
one moves, dead or alive                           the newest checkpoint, at its new address
"""

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
