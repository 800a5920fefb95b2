"""Tests of docs/migrating.md: its two programs run, and contain the lines of its table."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.pages import snippets
from tests.program_runner import COORDINATOR, ProgramRunner

PAGE = ROOT / "docs" / "migrating.md"
COMPAT, OWN = snippets(PAGE)
# Lines of the table that no program has: another process, or a class that Keras 3 does not have.
ELSEWHERE = {"coordinator serve", "coordinator.SidecarEvaluator(model, data, directory)"}
COMPAT_NAMES = {
    "tf.distribute.ParameterServerStrategy(": "ParameterServerStrategy(",
    "tf.distribute.coordinator.ClusterCoordinator(": "ClusterCoordinator(",
}


def rows() -> list[list[str]]:
    table = re.search(r"^\| Step .*?\n\n", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:] if line]


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(("name", "program", "steps"), [("compat", COMPAT, 50), ("own names", OWN, 50)])
def test_the_programs_of_the_page_run(
    run_program: ProgramRunner, tmp_path: Path, name: str, program: str, steps: int
) -> None:
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 1, tmp_path / "program.py", timeout=240).stdout
    assert re.search(rf"^{name}: {steps} steps, last loss [\d.]+", printed, re.MULTILINE), printed


def test_the_table_has_four_cells_in_each_row_and_every_step() -> None:
    assert len(rows()) >= 20
    assert {len(row) for row in rows()} == {4}


def test_the_program_with_own_names_has_the_lines_of_the_table() -> None:
    lines = {code for _, _, own, _ in rows() for code in re.findall(r"^`([^`]+)`$", own)}
    missing = [line for line in lines - ELSEWHERE if line not in OWN and not line.startswith("except ")]
    assert len(lines) > 12
    assert not missing


def test_the_program_with_compat_has_tensorflows_lines() -> None:
    lines = [code for _, before, _, _ in rows() for code in re.findall(r"^`([^`]+)`$", before)]
    for former, name in COMPAT_NAMES.items():
        lines = [line.replace(former, name) for line in lines]
    found = [line for line in lines if line in COMPAT]
    assert len(found) >= 12, sorted(set(lines) - set(found))
