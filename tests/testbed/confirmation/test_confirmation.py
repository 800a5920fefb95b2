"""Tests of the whole command: its options, and the agreement of real servers with the simulator."""

import re

import pytest

from coordinator.__main__ import main
from coordinator.testbed.confirmation import Confirmation
from tests.program_runner import COORDINATOR, ProgramRunner


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--workers", "1,2"], "--workers must be from 2 to 16, one of them slow; got (1, 2)."),
        (["--workers", "many"], "--workers must be integers such as 2,3,4; got 'many'."),
        (["--confirm-seconds", "0.5"], "--confirm-seconds must be a number of seconds from 1 to 3600, got 0.5."),
        (["--confirm-seconds", "nan"], "--confirm-seconds must be a number of seconds from 1 to 3600, got nan."),
        (["--confirm-repeats", "0"], "--confirm-repeats must be an integer from 1 to 100, got 0."),
        (["--delays", "1"], "--delays is for experiments; --confirm does not take it."),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_with_its_name(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["testbed", "--confirm", *options]) == 2
    assert capsys.readouterr().err == f"coordinator testbed: {reason}\n"


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


def test_options_are_checked_before_tensorflow_is_loaded(run_program: ProgramRunner) -> None:
    """It reads how much it is to log when it is loaded, so the command sets that before."""
    source = """
        import sys
        from coordinator.cli.command_line import main
        assert main(["testbed", "--confirm", "--workers", "1"]) == 2
        print("tensorflow" in sys.modules)
    """
    assert run_program(source, fresh=True).stdout == "False\n"
