import csv
import os
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest

from coordinator.__main__ import main
from tests.launch.command_process import CommandProcess
from tests.program_runner import COORDINATOR, ProgramRunner

# Four trainings, as short as can be.
SMALL = ["testbed", "--workers=2", "--delays=0.1,0.2", "--batches=40", "--step-time=0.03", "--batch-size=20"]


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["testbed", "--output", str(tmp_path)]) == 2
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line == "coordinator testbed: The test-bed needs scikit-learn: pip install 'coordinator-tf[testbed]'."


@pytest.mark.cluster
@pytest.mark.release
def test_a_small_grid_is_trained_on_real_servers_and_results_are_written(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    printed = run_program(COORDINATOR, *SMALL, "--output", tmp_path / "results", timeout=280).stdout
    names = ["loss_2_workers.png", "loss_2_workers_over_time.png", "losses.csv", "summary.csv", "summary.txt"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == names
    assert (tmp_path / "results" / "summary.txt").read_text() in f"{printed}\n"
    assert "no delay, synchronous and asynchronous about the same: " in printed
    with (tmp_path / "results" / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*Counter((row["mode"], row["delay_s"]) for row in rows).values()] == [40] * 4
    with (tmp_path / "results" / "summary.csv").open(newline="") as file:
        staleness = {(row["mode"], row["delay_s"]): float(row["mean_staleness"]) for row in csv.DictReader(file)}
    assert staleness["sequential", "0.0"] == staleness["synchronous", "0.0"] == 0
    # Two workers without delay have a mean staleness of one at most.
    assert staleness["asynchronous", "0.2"] > 1


@pytest.mark.cluster
@pytest.mark.release
def test_ctrl_c_writes_the_results_so_far_and_leaves_no_process(tmp_path: Path) -> None:
    with CommandProcess(*SMALL, "--output", tmp_path, environment=os.environ) as command:
        # Without this, the width is 0, and a progress bar does not fit.
        termios.tcsetwinsize(command.terminal, (24, 120))
        command.wait_output(r"sequential: \d+ spikes, final loss")
        command.type("\x03")
        assert command.wait_ended() == 130
        assert not command.left()
    assert "batch/s" in command.output
    assert "Traceback" not in command.output
    assert "Stopped after 1 of 4 trainings." in (tmp_path / "summary.txt").read_text()
    with (tmp_path / "losses.csv").open(newline="") as file:
        assert {row["mode"] for row in csv.DictReader(file)} == {"sequential"}
