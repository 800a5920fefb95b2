"""The benchmark of the advice about the number of workers runs on real servers."""

import re
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.cluster
@pytest.mark.long
def test_each_run_expects_a_rate_of_each_other() -> None:
    command = [sys.executable, "-m", "benchmarks.scale_advice", "--workers", "1", "2", "--seconds", "5"]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=250).stdout
    rows = re.findall(r"^([12]) +([12])  +([\d.]+) +([\d.]+) +\S+ +([\d.]+)", printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")], printed
    # How near they are depends on what else the machine does.
    for *_, measured, advised, simulated in rows:
        assert 0.3 < float(advised) / float(measured) < 3
        assert 0.3 < float(simulated) / float(measured) < 3
    assert len(re.findall("more workers would bring", printed)) == 2
