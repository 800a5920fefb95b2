"""Tests of the whole command: its options, and the agreement of real servers with the simulator."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.__main__ import main
from coordinator.testbed.confirmation import (
    Comparison,
    Confirmation,
    Figures,
    LossComparison,
    difference,
    draw,
    table,
    text,
    times_table,
    verdict,
)
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.results import LossCurve, TrialResult
from coordinator.testbed.step_times import Run, StepTimes
from tests.program_runner import COORDINATOR, ProgramRunner
from tests.testbed.made_up import asynchronous


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--workers", "1,2"], "--workers must be from 2 to 16, one of them slow; got (1, 2)."),
        (["--workers", "many"], "--workers must be integers such as 2,3,4; got 'many'."),
        (["--confirm-seconds", "0.5"], "--confirm-seconds must be a number of seconds from 1 to 3600, got 0.5."),
        (["--simulated", "--confirm-seconds", "3"], "--confirm-seconds is not for --simulated --confirm, which takes"),
        (["--delays", "1"], "--delays is for experiments; --confirm does not take it."),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_with_its_name(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["testbed", "--confirm", *options]) == 2
    assert capsys.readouterr().err.startswith(f"coordinator testbed: {reason}")


def test_options_have_defaults_and_workers_are_listed_once() -> None:
    assert Confirmation.of({"workers": None, "confirm_seconds": None, "confirm_repeats": None}) == Confirmation()
    chosen = Confirmation.of({"workers": "4,2,4", "confirm_seconds": 2.0, "confirm_repeats": 5})
    assert (chosen.workers, chosen.seconds, chosen.repeats, chosen.runs) == ((2, 4), 2.0, 5, 50)


@pytest.mark.cluster
@pytest.mark.long
def test_real_servers_and_the_simulator_agree_under_all_rules(
    run_program: ProgramRunner,
) -> None:
    arguments = ["--workers", 3, "--confirm-seconds", 4, "--confirm-repeats", 3]
    printed = run_program(COORDINATOR, "testbed", "--confirm", *arguments, timeout=280).stdout
    rows = re.findall(r"^(\w[\w ]*), 3 +([\d.]+) +([\d.]+) +([+-][\d.]+)%  .* ([+-][\d.]+)% +", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["async", "sync", "SSP", "bounded delay", "model average"], printed
    for rule, *_, staleness_off_by, speed_off_by in rows:
        # A real worker may begin while the gradient that it waited for is still being applied, which
        # the simulator does not model; the busier the machine, the longer that takes.
        most = 20.0 if rule == "bounded delay" else 10.0
        assert abs(float(staleness_off_by)) <= most, (rule, printed)
        assert abs(float(speed_off_by)) <= 10.0, (rule, printed)
    assert re.search(r"[45] of 5 settings agree within 10%", printed)


TIMES = StepTimes(computed=((0.1, 0.12), (0.1, 0.1), (0.25,)), dispatch=(0.01, 0.03), pull=0.004, push=0.006)


def figures(staleness: float = 2.0, rate: float = 20.0, idle: float = 0.0) -> Figures:
    return Figures(staleness, 5, rate, idle)


def comparison(real: Figures, simulated: Figures, repeated: list[Figures] | None = None) -> Comparison:
    return Comparison("SSP, 3", real, simulated, repeated or [real], TIMES)


@pytest.mark.parametrize(
    ("simulated", "agrees"),
    [
        (figures(), True),
        (figures(staleness=2.19), True),
        (figures(staleness=2.21), False),
        (figures(rate=17.9), False),
        # Idle time is shown, but not compared.
        (figures(idle=0.5), True),
    ],
)
def test_both_staleness_and_speed_must_be_within_a_tenth(simulated: Figures, agrees: bool) -> None:
    assert comparison(figures(), simulated).agrees is agrees


def test_the_tables_have_a_row_for_each() -> None:
    found = [comparison(figures(idle=0.25), figures(staleness=2.1, rate=19.0, idle=0.3))]
    assert table(found).splitlines()[2].split() == [
        *("SSP,", "3", "2.00", "2.10", "+5.0%", "5", "5", "20.00", "19.00", "-5.0%", "25.0%", "30.0%")
    ]
    trials = times_table(found).splitlines()[2]
    assert trials.split() == [
        *("SSP,", "3", "105.0", "ms", "250.0", "ms", "4.0", "ms", "6.0", "ms", "20.0", "ms", "22%")
    ]


def test_differences_within_noise_are_distinguished_from_larger_ones() -> None:
    apart = [figures(staleness=1.5, rate=20.0), figures(staleness=2.5, rate=20.1)]
    (agreed, line) = verdict([comparison(figures(), figures(staleness=2.4, rate=30.0), apart)]).splitlines()
    assert agreed == "0 of 1 settings agree within 10% in mean staleness and in updates/s."
    assert line == (
        "SSP, 3: mean staleness +20%; the real runs had 1.50 to 2.50, the simulated value is in that range: within "
        "noise; updates/s +50%; the real runs had 20.00 to 20.10, the simulated value is outside that range."
    )


def test_several_runs_are_combined_into_one() -> None:
    short = Run(seconds=10.0, updates=30, histogram=np.array([10, 20, 0]), waited=3.0, recorded=[])
    long = Run(seconds=30.0, updates=170, histogram=np.array([0, 100, 70]), waited=5.0, recorded=[])
    figures = Figures.of_runs([short, long], workers=2)
    assert figures.mean_staleness == pytest.approx((120 + 140) / 200)
    assert figures.p99_staleness == 2
    assert figures.updates_per_second == pytest.approx(5.0)
    assert figures.idle_share == pytest.approx(8.0 / 80.0)


REAL = asynchronous(2, 0.0)
HIGHER = replace(REAL, losses=1.2 * REAL.losses)
LATE = asynchronous(3, 1.0, quickness=0.0)


def compared(real: list[LossCurve], simulated: list[LossCurve]) -> LossComparison:
    return LossComparison(TrialResult(real), TrialResult(simulated))


def test_the_difference_is_a_share_of_the_real_loss() -> None:
    assert difference([compared([REAL], [REAL])]) == 0
    assert difference([compared([REAL], [HIGHER])]) == pytest.approx(0.2)
    assert difference([compared([HIGHER], [REAL])]) == pytest.approx(0.2 / 1.2)


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
