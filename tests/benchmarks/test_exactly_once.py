"""Tests that a model has seen each example once while clients, workers and parameter servers die at random."""

import faulthandler
import json
import sys

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
import sys
from benchmarks.exactly_once import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--runs", 1, "--seed", 4, "--seconds", 15], marks=pytest.mark.long),
        pytest.param(["--minutes", 10, "--seconds", 60], marks=pytest.mark.release),
    ],
)
@pytest.mark.timeout(2400)
def test_no_example_is_left_out_or_repeated_whatever_dies(run_program: ProgramRunner, arguments: list[object]) -> None:
    # The limit for all tests (`faulthandler_timeout`) is too short for ten minutes and what the last run takes.
    faulthandler.dump_traceback_later(2350, exit=True, file=sys.__stderr__)
    printed = run_program(PROGRAM, *arguments, timeout=2300).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["hold"] == found["runs"] > 0, printed
    assert sum(found["faults"].values()) > 0, printed
