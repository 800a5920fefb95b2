"""Strategies that are opened and closed, and workers that return, leave no memory behind."""

from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import memory_use

pytestmark = [pytest.mark.cluster, pytest.mark.release, pytest.mark.timeout(1800)]

REPETITIONS = 50
# Until then functions of all sizes are traced, and the processes' own caches fill.
WARM_UP = 15
GROWTH = 1.05


@pytest.mark.parametrize("kind", ["opened", "restarted"])
def test_fifty_repetitions_need_no_more_memory(run_program: ProgramRunner, kind: str) -> None:
    program = run_program(Path(memory_use.__file__).read_text(), kind, WARM_UP + REPETITIONS, timeout=1700)
    used = [[int(size) for size in line.split()] for line in program.stdout.splitlines()[-WARM_UP - REPETITIONS :]]
    assert len(used) == WARM_UP + REPETITIONS
    for process, (before, after) in enumerate(zip(used[WARM_UP - 1], used[-1], strict=True)):
        assert after <= GROWTH * before, f"process {process}: {[sizes[process] for sizes in used]}"
