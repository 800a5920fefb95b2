"""Tests of experiments: their options, and the commands of `docs/testbed.md`."""

import argparse
import re
import shlex

import pytest

from coordinator.cli.testbed import add_testbed
from coordinator.errors import SettingError
from coordinator.simulation.distribution import FORMS, Constant, LogNormal, RandomDelay
from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, Experiment, Trial
from tests import ROOT

_UNITLESS = "must be a time of at least 0, in seconds or with its unit: 0.5 or 500ms, got '2h'."


def test_the_default_grid_is_that_of_the_paper() -> None:
    experiment = Experiment.of({})
    assert experiment == Experiment()
    assert experiment.delays == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert experiment.batch_size == (100,)
    assert len(experiment.trials()) == 1 + 2 + 3 * 5
    assert experiment.most_workers == 3


def test_options_are_read_as_text() -> None:
    given = {"workers": "3, 1,3", "delays": "2,0.5", "modes": "asynchronous,sequential", "batches": "50"}
    experiment = Experiment.of(given)
    assert experiment.trials() == [
        Trial(SEQUENTIAL, 1),
        *(Trial(ASYNCHRONOUS, workers, delay) for workers in (1, 3) for delay in (0.5, 2.0)),
    ]
    assert [experiment.batches_of(Trial(ASYNCHRONOUS, workers, 0.0)) for workers in (1, 3)] == [50, 51]


def test_delays_are_numbers_or_distributions_and_may_differ_between_workers() -> None:
    experiment = Experiment.of({"delays": "lognormal(0.1, 1.0), 0.1, 0/500ms"})
    number, random, each = experiment.delays
    assert number == 0.1
    assert isinstance(random, RandomDelay)
    assert random.each == (LogNormal(0.1, 1.0),)
    assert isinstance(each, RandomDelay)
    assert each.each == (Constant(0.0), Constant(0.5))
    trials = [str(trial) for trial in experiment.trials() if trial.mode == ASYNCHRONOUS and trial.workers == 2]
    assert trials == [f"asynchronous, 2 workers, delay {text} s" for text in ("0.1", "lognormal(0.1,1.0)", "0/500ms")]


def test_optimizers_rates_decays_and_batch_sizes_are_axes_of_the_grid() -> None:
    given = {"optimizer": "adam,sgd", "learning_rate": "0.02,0.01", "batch_size": "50", "modes": "sequential"}
    experiment = Experiment.of(given)
    assert [str(trial) for trial in experiment.trials()] == [
        "sequential, adam, rate 0.01",
        "sequential, adam, rate 0.02",
        "sequential, sgd, rate 0.01",
        "sequential, sgd, rate 0.02",
    ]
    assert {trial.descent.batch_size for trial in experiment.trials()} == {50}
    assert "minibatches of 50 in each training" in str(experiment)
    assert ", optimizer adam, sgd, learning rate 0.01, 0.02, seed 0;" in str(experiment)
    assert ", learning rate 0.01, weight decay 0, 0.1, " in str(Experiment(weight_decay=(0.0, 0.1)))


@pytest.mark.parametrize(
    ("given", "option", "reason"),
    [
        ({"workers": "0"}, "workers", "must be an integer from 1 to 16, got 0."),
        ({"workers": "1", "modes": "synchronous"}, "workers", "must have one of at least 2 for the synchronous mode."),
        ({"delays": "0,-1"}, "delays", "must be a number of seconds from 0 to 3600, got -1.0."),
        ({"delays": "0, often(1)"}, "delays", f"has no distribution 'often'; it may be one of {', '.join(FORMS)}."),
        ({"delays": "exponential(2h)"}, "delays", _UNITLESS),
        ({"modes": "hogwild"}, "modes", "must be of sequential, synchronous, asynchronous, got 'hogwild'."),
        ({"batches": "1.5"}, "batches", "must be an integer, got '1.5'."),
        ({"data": "cifar10"}, "folder", "is needed with --data cifar10: where data_batch_1 to data_batch_5 are."),
    ],
)
def test_the_error_names_a_wrong_option_and_the_allowed_values(given: dict[str, str], option: str, reason: str) -> None:
    with pytest.raises(SettingError) as caught:
        Experiment.of(given)
    assert (caught.value.option, caught.value.reason) == (option, reason)


PAGE = (ROOT / "docs" / "testbed.md").read_text(encoding="utf-8")


def experiment(command: str) -> Experiment:
    parser = argparse.ArgumentParser()
    add_testbed(parser.add_subparsers())
    return Experiment.of(vars(parser.parse_args(shlex.split(command)[1:])))


def test_every_command_of_the_page_is_an_experiment() -> None:
    commands = re.findall(r"```sh\n(coordinator testbed.*)\n```", PAGE)
    assert len(commands) == PAGE.count("\ncoordinator testbed ") == 10
    assert [len(experiment(command).trials()) for command in commands] == [7, 18, 6, 54, 18, 6, 18, 13, 18, 18]
