"""The programs of the page about embeddings run."""

import re

import pytest

from tests import ROOT
from tests.program_runner import COORDINATOR

PAGE = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
PROGRAMS = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "strategy.close()" in each]


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=["rowwise", "growing"])
def test_the_programs_of_the_page_train_their_tables(run_program, tmp_path, program):
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 2, tmp_path / "program.py", timeout=180).stdout
    [loss] = re.findall(r"^\d\.\d+$", printed, re.M)
    assert 0.0 < float(loss) < 2.0
