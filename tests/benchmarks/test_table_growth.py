"""Tests of the benchmark of a table that grows."""

import re

import pytest

from tests import ROOT
from tests.program_runner import ProgramRunner

ACTIONS = ["nothing", "checkpoint", "updating a hundredth", "delta of it", "export", "evicting unused rows"]


def test_the_results_have_the_names_of_the_program() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    table = results.partition("benchmarks.table_growth")[2].partition("```\n")[2].partition("```")[0]
    names = [re.split("  +", line)[0] for line in table.splitlines()[2:]]
    assert "growing to 1,000,000 rows" in names
    assert {*names} - {"growing to 1,000,000 rows"} <= {*ACTIONS}


@pytest.mark.cluster
@pytest.mark.long
def test_each_action_is_measured(run_program: ProgramRunner) -> None:
    shown = run_program("from benchmarks import table_growth; table_growth.main(['--quick'])").stdout
    rows = {
        row[0]: [float(number) for number in row[1].split()]
        for row in re.findall(r"^(.+?)((?: +[\d.]+){5})$", shown, re.M)
    }
    assert [*rows] == [ACTIONS[0], "growing to 40,000 rows", *ACTIONS[1:]], shown
    assert 0 < rows["delta of it"][-1] < rows["checkpoint"][-1] / 4
