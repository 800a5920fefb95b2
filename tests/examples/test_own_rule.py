"""The example `own_rule/train.py` learns the digits by its rule, as a program outside of the checkout."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

EXAMPLE = ROOT / "examples" / "own_rule" / "train.py"
COMMAND = "run --workers 3 --ps 2"


def test_the_own_rule_fits_in_80_lines_and_shows_its_command() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text.count("\n") < 80
    assert f"\ncoordinator {COMMAND} examples/own_rule/train.py\n" in text


@pytest.mark.release
def test_the_digits_are_learned_by_an_own_rule_outside_of_the_checkout(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    program = shutil.copy(EXAMPLE, tmp_path / "program.py")
    printed = run_program(COORDINATOR, *COMMAND.split(), program, timeout=360).stdout
    accuracy = re.search(r"^held-out accuracy (\S+)$", printed, re.MULTILINE)
    assert accuracy is not None, printed
    assert float(accuracy[1]) >= 0.9
    assert re.search(r"^600 updates, 0 of 600 gradients rejected, staleness mean ", printed, re.MULTILINE), printed
