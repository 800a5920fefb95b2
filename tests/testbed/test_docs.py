"""Tests that the commands of `docs/testbed.md` are valid, and that the files and options that it names exist."""

import argparse
import re
import shlex

import pytest

from coordinator.cli.command_line import main
from coordinator.cli.testbed import add_testbed
from coordinator.testbed import report
from coordinator.testbed.experiment import Experiment
from tests import ROOT

PAGE = (ROOT / "docs" / "testbed.md").read_text(encoding="utf-8")


def experiment(command: str) -> Experiment:
    parser = argparse.ArgumentParser()
    add_testbed(parser.add_subparsers())
    return Experiment.of(vars(parser.parse_args(shlex.split(command)[1:])))


def test_every_command_of_the_page_is_an_experiment() -> None:
    commands = re.findall(r"```sh\n(coordinator testbed.*)\n```", PAGE)
    assert len(commands) == PAGE.count("\ncoordinator testbed ") == 10
    assert [len(experiment(command).trials()) for command in commands] == [7, 18, 6, 54, 18, 6, 18, 13, 18, 18]


def test_the_options_and_files_on_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["testbed", "--help"])
    known = capsys.readouterr().out
    assert all(option in known for option in re.findall(r"`(--[a-z-]+)`", PAGE))
    written = re.findall(r"`([a-z_]+\.(?:csv|txt))`", PAGE)
    assert set(written) == {report.LOSSES, report.TABLE, report.SUMMARY}
    names = re.findall(r"`(coordinator/[\w/.]+)`", PAGE)
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert names
    assert all((ROOT / name).exists() for name in names)
    assert all((ROOT / "docs" / link).exists() for link in links)


def test_the_measurements_on_the_page_are_of_the_default_grid() -> None:
    assert str(Experiment()) in PAGE
    shown = [line for line in PAGE.splitlines() if line.startswith(("sequential  ", "synchronous, ", "asynchronous, "))]
    assert [line.partition("  ")[0] for line in shown] == [str(trial) for trial in Experiment().trials()]
