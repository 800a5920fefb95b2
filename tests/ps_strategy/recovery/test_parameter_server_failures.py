"""Parameter servers die: an error names them, and a new strategy continues from a checkpoint.

which tasks die                     when                      what join, schedule and the futures raise
one parameter server, restarted     between two calls         ParameterServerLost: its variables are gone
every parameter server, a worker    while functions run       the same; the first one is named
"""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import moved_parameter_server, parameter_server_losses

pytestmark = pytest.mark.cluster


# rows 90, 91, 92, 93, 94, 95, 97.
def test_callers_are_told_which_server_died_and_can_continue(run_program: ProgramRunner) -> None:
    run_program(Path(parameter_server_losses.__file__).read_text(), timeout=280)


@pytest.mark.long
def test_a_parameter_server_moves_to_another_address_dead_or_alive(run_program: ProgramRunner) -> None:
    run_program(Path(moved_parameter_server.__file__).read_text(), timeout=280)
