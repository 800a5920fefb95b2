import re
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.__main__ import main
from coordinator.testbed.confirmation import LossComparison, difference, draw, text
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.results import LossCurve, TrialResult
from tests.program_runner import COORDINATOR, ProgramRunner
from tests.testbed.made_up import asynchronous

REAL = asynchronous(2, 0.0)
HIGHER = replace(REAL, losses=1.2 * REAL.losses)
LATE = asynchronous(3, 1.0, quickness=0.0)


def compared(real: list[LossCurve], simulated: list[LossCurve]) -> LossComparison:
    return LossComparison(TrialResult(real), TrialResult(simulated))


def test_the_difference_is_a_share_of_the_real_loss() -> None:
    assert difference([compared([REAL], [REAL])]) == 0
    assert difference([compared([REAL], [HIGHER])]) == pytest.approx(0.2)
    assert difference([compared([HIGHER], [REAL])]) == pytest.approx(0.2 / 1.2)


def test_means_of_repetitions_are_compared_and_not_single_runs() -> None:
    lower = replace(REAL, losses=0.8 * REAL.losses)
    assert difference([compared([HIGHER, lower], [REAL, REAL])]) == pytest.approx(0, abs=1e-9)


def test_the_difference_over_the_grid_weighs_each_minibatch_alike() -> None:
    off, same = compared([REAL], [HIGHER]), compared([LATE], [LATE])
    total = REAL.smoothed.sum() + LATE.smoothed.sum()
    assert difference([off, same]) == pytest.approx(0.2 * REAL.smoothed.sum() / total)


@pytest.mark.parametrize(("simulated", "verdict"), [(REAL, "0.0%: they agree within"), (HIGHER, "not within 10%")])
def test_the_table_has_a_row_for_each_training_and_a_verdict(simulated, verdict: str) -> None:
    printed = text(Experiment(repeats=1), [compared([REAL], [simulated])])
    assert re.search(r"^asynchronous, 2 workers, delay 0 s +0\.000 ", printed, re.MULTILINE)
    assert verdict in printed.splitlines()[-1]


def test_a_picture_for_each_number_of_workers_has_real_and_simulated_lines(tmp_path: Path) -> None:
    names = draw([compared([REAL], [HIGHER]), compared([LATE], [LATE])], tmp_path)
    assert names == ["simulated_2_workers.png", "simulated_3_workers.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)


def test_durations_of_the_other_confirmation_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "--confirm", "--simulated", "--confirm-seconds", "3"]) == 2
    assert "--confirm-seconds is not for --simulated --confirm, which takes --batches" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.long
def test_loss_curves_of_real_servers_and_of_virtual_time_agree(run_program: ProgramRunner, tmp_path: Path) -> None:
    grid = ["--quick", "--workers", 2, "--repeats", 2, "--output", tmp_path / "results"]
    printed = run_program(COORDINATOR, "testbed", "--simulated", "--confirm", *grid, timeout=280).stdout
    found = re.search(r"^Over the grid the loss curves differ by ([\d.]+)%", printed, re.MULTILINE)
    assert found, printed
    assert float(found[1]) <= 10, printed
    (sequential,) = re.findall(r"^sequential .* ([\d.]+)%$", printed, re.MULTILINE)
    # The same gradients in the same order.
    assert float(sequential) <= 0.5, printed
    assert (tmp_path / "results" / "simulated_2_workers.png").exists()
