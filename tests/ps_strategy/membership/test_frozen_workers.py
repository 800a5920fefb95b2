"""Real workers stop answering without dying.

who freezes              when                        what the caller sees
one                      all of them work            the others continue
one after the other      all of them work            each function runs elsewhere once the silence is noticed
one, which thaws         functions are scheduled     it is used again
one, for good            functions are scheduled     join returns, close returns
"""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import frozen_workers


@pytest.mark.cluster
@pytest.mark.long
def test_functions_of_a_frozen_worker_run_elsewhere_and_no_other_worker_pauses(run_program: ProgramRunner) -> None:
    run_program(Path(frozen_workers.__file__).read_text())
