"""Tests of policies: when a checkpoint is saved, and which are kept, as functions of the history and the moment."""

import pytest

from coordinator.checkpoints import Best, EveryHours, EveryMinutes, EverySteps, Latest, Moment, SavedCheckpoint
from coordinator.checkpoints.policies import check_policies

HOUR = 3600.0


def saved(step, hours=0.0, **metrics) -> SavedCheckpoint:
    return SavedCheckpoint(f"ckpt-{step}", step, step, hours * HOUR, metrics)


def steps_of(policy, history) -> list[int]:
    return [each.step for each in policy.kept(history, Moment(history[-1].step, history[-1].time))]


def test_every_steps_saves_when_a_multiple_was_reached_and_every_minutes_at_once():
    for last, step, is_due in (
        (None, 999, False),
        (None, 1000, True),
        (1000, 1999, False),
        (1000, 2000, True),
        # Saved late, or by hand: multiples stay where they are.
        (1003, 2000, True),
        (1990, 2001, True),
        # An older checkpoint was restored.
        (5000, 1001, True),
    ):
        history = [] if last is None else [saved(last)]
        assert EverySteps(1000).is_due(history, Moment(step, 0.0)) == is_due, (last, step)
    # Also if the clock was set back.
    for last, now, is_due in ((None, 0, True), (0, 599, False), (0, 600, True), (900, 0, True)):
        history = [] if last is None else [saved(1, last / HOUR)]
        assert EveryMinutes(10).is_due(history, Moment(2, float(now))) == is_due, (last, now)


def test_latest_keeps_the_newest_and_every_hours_those_so_far_apart():
    history = [saved(index, hours) for index, hours in enumerate([0, 1, 5.9, 6.1, 7, 12, 12.2])]
    assert steps_of(Latest(3), history) == [4, 5, 6]
    assert steps_of(Latest(9), history) == [*range(7)]
    assert steps_of(EveryHours(6), history) == [0, 3, 6]
    # The same when others were deleted.
    kept, history = set(), []
    for index in range(60):
        history.append(saved(index, index * 0.7))
        before, kept = kept, set(steps_of(EveryHours(6), history))
        assert before <= kept
        history = [each for each in history if each.step in kept or each is history[-1]]


def test_one_of_each_thousand_one_of_each_hundred_and_two_of_each_ten():
    policies = EverySteps(1000, latest=1), EverySteps(100, latest=1), EverySteps(10, latest=2)
    history, found = [], {}
    for step in range(10, 2300, 10):
        history.append(saved(step))
        found[step] = sorted({kept for policy in policies for kept in steps_of(policy, history)})
        history = [each for each in history if each.step in found[step]]
    assert found[1230] == [1000, 1200, 1220, 1230]
    assert found[1990] == [1000, 1900, 1980, 1990]
    assert found[2000] == [1990, 2000]


def test_best_keeps_the_best_and_of_equal_ones_the_newer():
    losses = [0.9, 0.2, float("nan"), 0.2, 0.5, 0.3]
    history = [saved(step, loss=loss) for step, loss in enumerate(losses)]
    assert steps_of(Best("loss", 2), history) == [3, 1]
    assert steps_of(Best("loss", 3, mode="max"), history) == [0, 4, 5]


def test_a_wrong_setting_is_named():
    for make, message in (
        (lambda: EverySteps(0), "steps must be an integer of at least 1"),
        (lambda: EveryHours(-1), "hours must be"),
        (lambda: EveryMinutes(1, latest=0), "latest must be"),
        (lambda: Latest(0), "count must be"),
        (lambda: Best("loss", mode="low"), 'mode must be "min" or "max"'),
        (lambda: Best(3), "metric must be the name"),
        (lambda: check_policies("keep", Latest(3), "kept"), r"such as \[coordinator.checkpoints.Latest\(3\)\]"),
        (lambda: check_policies("save", [Latest(3)], "is_due"), "a method is_due"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()
