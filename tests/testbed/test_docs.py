"""What `docs/testbed.md` says is so: its commands are understood, and what it names is there."""

import argparse
import re
import shlex

from coordinator.cli.testbed import add_options
from coordinator.testbed import report, spikes
from coordinator.testbed.experiment import Experiment
from tests.import_graph import ROOT

PAGE = (ROOT / "docs" / "testbed.md").read_text(encoding="utf-8")


def experiment(command: str) -> Experiment:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Experiment.of(vars(parser.parse_args(shlex.split(command)[2:])))


def test_every_command_of_the_page_is_an_experiment() -> None:
    commands = re.findall(r"```sh\n(coordinator testbed.*)\n```", PAGE)
    assert len(commands) == PAGE.count("\ncoordinator testbed ") == 4
    assert [len(experiment(command).cells()) for command in commands] == [7, 18, 6, 18]


def test_the_options_and_the_files_that_it_names_exist() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    known = parser.format_help()
    assert all(option in known for option in re.findall(r"`(--[a-z-]+)`", PAGE))
    written = re.findall(r"`([a-z_]+\.(?:csv|txt))`", PAGE)
    assert set(written) == {report.LOSSES, report.TABLE, report.SUMMARY}
    names = re.findall(r"`(coordinator/[\w/.]+)`", PAGE)
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert names
    assert all((ROOT / name).exists() for name in names)
    assert all((ROOT / "docs" / link).exists() for link in links)


def test_it_says_what_a_spike_is_as_the_code_has_it() -> None:
    assert f"more than {spikes.HEIGHT:g} above the least" in PAGE


def test_what_it_shows_as_measured_is_of_the_default_grid() -> None:
    assert str(Experiment()) in PAGE
    shown = [line for line in PAGE.splitlines() if line.startswith(("sequential  ", "synchronous, ", "asynchronous, "))]
    assert [line.partition("  ")[0] for line in shown] == [str(cell) for cell in Experiment().cells()]
