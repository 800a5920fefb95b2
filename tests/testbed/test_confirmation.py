"""Tests of the agreement of real servers with the simulator: its figures, and the command that compares them."""

import re
from pathlib import Path

import pytest

from coordinator.__main__ import main
from coordinator.testbed.confirmation import Comparison, Figures
from coordinator.testbed.step_times import StepTimes
from tests.program_runner import COORDINATOR, ProgramRunner


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--workers", "1,2"], "--workers must be from 2 to 16, one of them slow; got (1, 2)."),
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


@pytest.mark.cluster
@pytest.mark.release
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


def test_both_staleness_and_speed_must_be_within_a_tenth() -> None:
    # Idle time is shown, but not compared.
    for simulated, agrees in (
        (figures(idle=0.5), True),
        (figures(staleness=2.19), True),
        (figures(staleness=2.21), False),
        (figures(rate=17.9), False),
    ):
        found = Comparison("SSP, 3", figures(), simulated, [figures()], TIMES)
        assert found.agrees is agrees, simulated


@pytest.mark.cluster
@pytest.mark.release
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
