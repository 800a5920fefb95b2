"""Real workers are added, removed and moved while a client trains.

what changes                                    what the caller sees
a worker is added                               it has its own iterator, table and variable, and takes work
a worker is removed                             what it ran is finished, nothing fails
a worker dies, another one takes its place      work for that worker continues at the new address
two die, one returns                            it works, whatever happens to the other
a file that lists the workers changes           workers are added and removed; invalid content changes nothing
pods on Kubernetes are scaled and replaced      the same, also after faults of the API server
"""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import changing_workers


@pytest.mark.cluster
@pytest.mark.long
def test_workers_come_go_and_move_while_the_client_trains(run_program: ProgramRunner) -> None:  # row 87
    run_program(Path(changing_workers.__file__).read_text(), timeout=280)
