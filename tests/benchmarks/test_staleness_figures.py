"""Figures of many trainings are combined in one row; whether an effect was seen depends on figures only."""

import dataclasses
from types import SimpleNamespace

import pytest

from benchmarks.staleness_figures import Outcome, RuleFigures, is_falling_to_little, is_rescued, middle

FIGURES = RuleFigures(
    steps_per_second=50.0,
    accuracy_at_steps=0.8,
    accuracy_at_time=0.9,
    mean_staleness=1.5,
    max_staleness=4,
    updates=100,
    rejected=0.0,
    idle_shares=(0.1, 0.2, 0.3),
)


def test_the_median_of_one_training_is_that_training():
    assert middle([FIGURES]) == FIGURES


def test_the_summary_has_medians_and_the_largest_staleness():
    others = [
        dataclasses.replace(FIGURES, steps_per_second=10.0, max_staleness=9, idle_shares=(0.5, 0.0, 0.3)),
        dataclasses.replace(FIGURES, steps_per_second=20.0, max_staleness=3, idle_shares=(0.4, 0.1, 0.3)),
    ]
    found = middle([FIGURES, *others])
    assert found.steps_per_second == 20.0
    assert found.max_staleness == 9
    assert found.idle_shares == (0.4, 0.1, 0.3)


def test_the_figures_of_a_training_come_from_its_rules_statistics():
    seen = SimpleNamespace(
        staleness=SimpleNamespace(mean=1.5, max=4), updates=100, rejected=25, pushes=125, idle_shares={2: 0.3, 0: 0.1}
    )
    figures = RuleFigures.of(seen, steps_per_second=50.0, accuracies={"time": 0.9, "steps": 0.8})
    assert figures == dataclasses.replace(FIGURES, rejected=0.2, idle_shares=(0.1, 0.3))


def test_a_rule_that_pushed_nothing_rejected_nothing():
    seen = SimpleNamespace(staleness=SimpleNamespace(mean=0.0, max=0), updates=0, rejected=0, pushes=0, idle_shares={})
    assert RuleFigures.of(seen, steps_per_second=0.0, accuracies={"time": 0.1, "steps": 0.1}).rejected == 0


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.5, 0.3, 0.1, 0.02], True),
        ([0.5, 0.3, 0.33, 0.02], True),
        ([0.5, 0.1, 0.3, 0.02], False),
        ([0.1, 0.1, 0.05, 0.02], False),
        ([0.5, 0.4, 0.4, 0.3], False),
        ([0.5], False),
    ],
)
def test_a_curve_falls_if_it_begins_high_ends_low_and_never_rises(shares, expected):
    assert is_falling_to_little(shares) is expected


GOOD, BAD, MIDDLE = Outcome(0.2, 0.94, 20.0), Outcome(2.3, 0.1, 20.0), Outcome(0.9, 0.7, 20.0)
NOT_FINITE = Outcome(None, 0.1, 20.0)


@pytest.mark.parametrize(
    ("synchronous", "plain", "modulated", "expected"),
    [
        ([GOOD], [BAD], [GOOD], True),
        ([GOOD, GOOD], [BAD, NOT_FINITE], [GOOD, GOOD], True),
        ([GOOD, GOOD], [BAD, GOOD], [GOOD, GOOD], False),
        ([GOOD], [MIDDLE], [GOOD], False),
        ([GOOD], [BAD], [MIDDLE], False),
        ([NOT_FINITE], [BAD], [GOOD], False),
    ],
)
def test_an_effect_is_one_only_if_every_seed_shows_it(synchronous, plain, modulated, expected):
    assert is_rescued(synchronous, plain, modulated) is expected


def test_a_loss_that_is_not_finite_is_never_learning():
    assert not Outcome(None, 0.99, 0.0).has_learnt
    assert Outcome(None, 0.99, 0.0).is_lost
