"""Two minutes of training while servers are killed, restarted and frozen at random."""

import json

import pytest

from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.release, pytest.mark.timeout(600)]

SOAK = """
import sys
from benchmarks.chaos import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_soak_loses_nothing_and_stops_nobody_who_was_left_alone(run_program: ProgramRunner) -> None:
    program = run_program(SOAK, "--minutes", 2, "--seed", 5, "--json", timeout=560)
    found = json.loads(program.stdout.splitlines()[-1])
    assert found["holds"], found
    assert sum(found["faults"].values()) >= 5, found
    assert found["scheduled"] == found["finished"] > 100, found
