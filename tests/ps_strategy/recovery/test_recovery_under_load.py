"""A parameter server is lost while many fused calls run: each step after the restore runs once."""

import json
from pathlib import Path

import pytest

from tests.ps_strategy.failure_programs import recovery_under_load

LOSSES, STEPS = 4, 3_000


@pytest.mark.long
@pytest.mark.cluster
def test_steps_after_a_restore_run_exactly_once(run_program):
    source = Path(recovery_under_load.__file__).read_text()
    lines = run_program(source, LOSSES, STEPS, timeout=280).stdout.splitlines()
    for number, line in enumerate(lines):
        found = json.loads(line)
        assert found["recoveries"] == number + 1, "each loss had to be recovered from once"
        assert found["counts"] == found["expected"]
    assert len(lines) == LOSSES
