"""Tests of the benchmark of checkpoints."""

import pytest

from tests.program_runner import ProgramRunner


@pytest.mark.cluster
@pytest.mark.long
def test_each_way_saves(run_program: ProgramRunner) -> None:
    shown = run_program("from benchmarks import checkpoints; checkpoints.main(['--quick'])").stdout
    rows = [line.split() for line in shown.splitlines() if line.endswith(" 8")]
    assert [row[0] for row in rows] == ["background", "in", "manager"], shown
