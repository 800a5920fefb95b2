"""Tests that the commands of `docs/testbed.md` are valid, and that the files and options that it names exist."""

import argparse
import re
import shlex

from coordinator.cli.testbed import add_testbed
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


def test_the_measurements_on_the_page_are_of_the_default_grid() -> None:
    assert str(Experiment()) in PAGE
    shown = [line for line in PAGE.splitlines() if line.startswith(("sequential  ", "synchronous, ", "asynchronous, "))]
    assert [line.partition("  ")[0] for line in shown] == [str(trial) for trial in Experiment().trials()]
