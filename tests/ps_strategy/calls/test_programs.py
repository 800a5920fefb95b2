"""Tests in processes of their own: what runs under the queue's lock, and what waits for a frozen worker."""

import sys
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import queue_lock

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CORE = (
    "__main__",
    "coordinator.queueing",
    "coordinator.workers.cluster",
    "coordinator.workers.fusion_size",
    "coordinator.statistics",
    "coordinator.future",
)


def test_only_the_core_and_the_standard_library_run_under_the_queues_lock(run_program: ProgramRunner) -> None:
    program = run_program(Path(queue_lock.__file__).read_text(), timeout=280)
    modules = program.stdout.strip().splitlines()[-1].split()
    others = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    assert "coordinator.queueing.queue_state" in others
    assert [name for name in others if not name.startswith(CORE)] == []
