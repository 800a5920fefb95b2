"""The example `exactly_once/train.py`: the model has seen each example once in each epoch, whatever died."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.program_runner import ProgramRunner

EXAMPLE = ROOT / "examples" / "exactly_once" / "train.py"


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_model_sees_each_example_once_while_servers_are_killed(run_program: ProgramRunner, tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.argv[0] = {str(EXAMPLE)!r}; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    printed = run_program(program, "--seed", 3, "--directory", tmp_path / "saved", timeout=800).stdout
    assert "examples never seen: 0, seen again: 0" in printed, printed
    faults = re.search(r"^(\d+) faults: ", printed, re.MULTILINE)
    assert faults is not None, printed
    assert int(faults[1]) > 0
