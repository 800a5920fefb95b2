"""Tests that the commands and programs of `docs/simulation.md` run, and that a simulation loads nothing heavy."""

import re
import shlex
from pathlib import Path

import pytest

from coordinator.cli.command_line import main
from tests import ROOT
from tests.program_runner import ProgramRunner

PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```sh\n(coordinator simulate .*?)\n```\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[0-9][0-9,]*\.?[0-9]*(?:e[+-]?[0-9]+)?")


def skeleton(text: str) -> tuple[str, list[float]]:
    """Returns the text without its numbers and column widths, and the numbers."""
    numbers = [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
    return re.sub(r"[\s-]+", " ", _NUMBER.sub("N", text)), numbers


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(
            *found,
            id=found[0][20:60],
            marks=[pytest.mark.long] if "--sweep" in found[0] or "--compare" in found[0] else [],
        )
        for found in COMMANDS
    ],
)
def test_commands_print_what_the_page_shows_within_tolerance(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """About: NumPy promises the same random numbers for one release only."""
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    assert main(arguments) == 0
    # The speed of the simulation depends on the machine.
    words, numbers = skeleton(re.sub(r"events at [\d,]+", "events at 300,000", capsys.readouterr().out.strip()))
    shown_words, shown_numbers = skeleton(shown)
    assert words == shown_words
    assert numbers == pytest.approx(shown_numbers, rel=0.25, abs=1.0)
    if "--plot" in arguments:
        assert (tmp_path / arguments[arguments.index("--plot") + 1]).stat().st_size > 10_000


def test_every_command_of_the_page_is_run() -> None:
    assert len(COMMANDS) == PAGE.count("\ncoordinator simulate ") == 7


def test_the_programs_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec("\n".join(programs), {"__name__": "page"})  # noqa: S102 - it is what a reader runs
    assert capsys.readouterr().out.startswith("<Result: 16 workers, 4 ps, bounded_delay(")


def test_simulating_loads_nothing_heavy_and_other_commands_do_not_load_it(run_program: ProgramRunner) -> None:
    source = """
        import contextlib, sys
        from coordinator.cli.command_line import main
        with contextlib.suppress(SystemExit):
            main(["run", "--help"])
        print([name for name in ("numpy", "simpy", "coordinator.simulation") if name in sys.modules])
        from coordinator import simulation
        learning = simulation.Learning(simulation.SmallNetwork())
        for rule in (simulation.Asynchronous(), simulation.StaleSynchronous(2, 4), simulation.ModelAverage()):
            simulation.simulate(simulation.Setting(rule=rule, pushes=100, learning=learning))
        print([name for name in ("keras", "matplotlib", "tensorflow") if name in sys.modules])
    """
    assert run_program(source, fresh=True).stdout.endswith("\n[]\n[]\n")
