"""Parameter servers are lost while a plain loop trains: it sees nothing but the delay, and no function is traced again.

what is lost, and when                             what is restored
one parameter server, before any checkpoint        the initial values
both, and the newest checkpoint is damaged         the one before
one, and a worker                                  the newest checkpoint
one, while a checkpoint is saved                   the newest that is complete; then it is saved
one, and another one while the first is recovered  the newest checkpoint, after a failed attempt
one freezes and thaws while a worker dies          nothing: its variables are still there
"""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import parameter_server_recoveries, recovery_under_load

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_loop_without_failure_handling_trains_on_after_each_loss(run_program: ProgramRunner) -> None:
    errors = run_program(Path(parameter_server_recoveries.__file__).read_text(), timeout=280).stderr
    # Objects that are deleted during a recovery raise nothing.
    assert "Traceback" not in errors, errors
    assert "Exception ignored" not in errors, errors


def test_steps_after_a_restore_run_exactly_once_in_calls_of_many(run_program: ProgramRunner) -> None:
    run_program(Path(recovery_under_load.__file__).read_text(), timeout=280)
