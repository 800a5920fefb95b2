"""Two minutes of training while servers are killed, restarted and frozen at random."""

import json

import pytest

from benchmarks.chaos import longest_pause
from coordinator.testing.chaos import Fault
from tests.program_runner import ProgramRunner

SOAK = """
import sys
from benchmarks.chaos import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_soak_test_loses_nothing_and_unaffected_workers_continue(run_program: ProgramRunner) -> None:
    program = run_program(SOAK, "--minutes", 2, "--seed", 5, "--json", timeout=560)
    found = json.loads(program.stdout.splitlines()[-1])
    assert found["holds"], found
    assert sum(found["faults"].values()) >= 5, found
    assert found["scheduled"] == found["finished"] > 100, found


# Both workers return a result each second, except worker 1 between 103 and 109.
RESULTS = sorted([(100.0 + at, 0) for at in range(20)] + [(100.0 + at, 1) for at in range(20) if not 3 < at < 9])


def fault(job: str, index: int, begins: float, ends: float) -> Fault:
    return Fault("kill", job, index, begins, ends)


@pytest.mark.parametrize(
    ("faults", "pause"),
    [
        ([], 6.0),
        ([fault("worker", 1, 3.5, 6.0)], 1.0),
        ([fault("worker", 1, 2.9, 3.0)], 1.0),
        ([fault("worker", 0, 3.5, 6.0)], 6.0),
        ([fault("ps", 0, 5.0, 8.0)], 1.0),
        ([fault("worker", 1, 12.0, 14.0)], 6.0),
    ],
)
def test_only_pauses_that_no_fault_explains_count(faults: list[Fault], pause: float) -> None:
    assert longest_pause(RESULTS, faults, 100.0, [0, 1]) == pause


def test_without_results_there_is_no_pause() -> None:
    assert longest_pause([], [], 0.0, [0, 1]) == 0.0
