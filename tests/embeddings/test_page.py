"""The program of the page about embeddings runs."""

import re

import pytest

from tests import ROOT
from tests.program_runner import COORDINATOR


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(200)
def test_the_program_of_the_page_trains_its_table(run_program, tmp_path):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 2, tmp_path / "program.py", timeout=180).stdout
    [loss] = re.findall(r"^\d\.\d+$", printed, re.M)
    assert 0.0 < float(loss) < 2.0
