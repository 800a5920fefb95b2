"""The example `restart/train.py`: killed while it trains, it continues from its latest checkpoint and finishes."""

import concurrent.futures
import re
import signal
from pathlib import Path

import pytest

from tests import ROOT
from tests.deadline import wait_until
from tests.examples.test_examples import programs
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

EXAMPLE = ROOT / "examples" / "restart" / "train.py"
COMMAND = "run --workers 2 --ps 1 --restarts 3"


@pytest.mark.long
def test_a_killed_program_continues_from_its_latest_checkpoint_and_finishes(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    assert f"\ncoordinator {COMMAND} examples/restart/train.py\n" in EXAMPLE.read_text(encoding="utf-8")
    directory = tmp_path / "checkpoints"
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        command = threads.submit(
            run_program, COORDINATOR, *COMMAND.split(), EXAMPLE, "--directory", directory, timeout=300
        )
        wait_until(lambda: command.done() or (directory / "checkpoint").exists(), 240.0)
        for client in programs(EXAMPLE, "--directory", str(directory)):
            client.send_signal(signal.SIGKILL)
        ended = command.result()

    begun = [int(step) for step in re.findall(r"^process \d+ begins at step (\d+)$", ended.stdout, re.MULTILINE)]
    assert len(begun) == 2, ended.stdout
    assert begun[0] == 0
    assert 0 < begun[1] < 1200
    assert begun[1] % 60 == 0
    final = re.search(r"^(\d+) steps, accuracy (\S+)$", ended.stdout, re.MULTILINE)
    assert final is not None, ended.stdout
    assert int(final[1]) == 1200
    assert float(final[2]) >= 0.95
    assert "the chief was ended by SIGKILL: starting it again, restart 1 of 3." in ended.stderr
