"""The program of the page about embeddings runs."""

import re

import pytest

from tests import ROOT


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(200)
def test_the_program_of_the_page_trains_its_table(run_program):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8"), re.S)
    assert 0.0 < float(run_program(program, timeout=180).stdout) < 2.0
