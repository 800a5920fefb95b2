"""Tests of the benchmark of a table that grows."""

import re

import pytest

from tests.program_runner import ProgramRunner


@pytest.mark.cluster
@pytest.mark.long
def test_each_action_is_measured(run_program: ProgramRunner) -> None:
    shown = run_program("from benchmarks import table_growth; table_growth.main(['--quick'])").stdout
    rows = {
        row[0]: [float(number) for number in row[1].split()]
        for row in re.findall(r"^(.+?)((?: +[\d.]+){5})$", shown, re.M)
    }
    assert [*rows] == [
        "nothing",
        "growing to 40,000 rows",
        "checkpoint",
        "updating a hundredth",
        "delta of it",
        "export",
        "evicting unused rows",
    ], shown
    assert 0 < rows["delta of it"][-1] < rows["checkpoint"][-1] / 4
