"""The example `update_rules/train.py` learns the digits under each rule that it offers, and shows its statistics."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

EXAMPLE = ROOT / "examples" / "update_rules" / "train.py"
COMMAND = "run --workers 3 --ps 2"


def test_the_example_is_run_by_the_command_in_its_docstring() -> None:
    assert f"\ncoordinator {COMMAND} examples/update_rules/train.py\n" in EXAMPLE.read_text(encoding="utf-8")


@pytest.mark.release
@pytest.mark.parametrize("rule", ["asynchronous", "model-average"])
def test_the_digits_are_learned_and_the_statistics_are_printed(
    run_program: ProgramRunner, tmp_path: Path, rule: str
) -> None:
    command = [*COMMAND.split(), EXAMPLE, "--rule", rule, "--directory", tmp_path / "summaries"]
    printed = run_program(COORDINATOR, *command, timeout=360).stdout
    accuracy = re.search(r"^held-out accuracy (\S+)$", printed, re.MULTILINE)
    assert accuracy is not None, printed
    assert float(accuracy[1]) >= 0.8
    seen = re.search(r"^(\d+) updates, (\d+) of (\d+) gradients rejected, staleness mean .*$", printed, re.MULTILINE)
    assert seen is not None, printed
    assert int(seen[1]) > 0
    assert rule == "synchronous" or seen[2] == "0"
    assert list((tmp_path / "summaries").rglob("events.out.tfevents.*"))
