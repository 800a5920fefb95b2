"""Tests of delayed gradients: a pull applies those whose delay is over, in the order of pushes; none is lost."""

import math

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Delayed, Synchronous, decisions
from tests.updates import descent
from tests.updates.descent import value_of
from tests.updates.rules.delayed_steps import entries, make_rule, new_step

NEVER = math.inf


def halve_and_descend(variable, gradient, rate):
    """An update function whose result depends on the order of the gradients."""
    variable.assign(0.5 * variable - rate * gradient)


def test_a_pull_applies_due_gradients_and_requeues_the_rest(strategy, variables):
    with strategy.scope():
        delay = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    rule = make_rule(strategy, variables, lambda worker, time: delay.read_value(), halve_and_descend)
    step = new_step(strategy, rule, variables)
    model, version, waiting, staleness = 0.0, 0, [], []

    def apply(chosen):
        nonlocal model, version
        for value, pulled_version, _, _ in chosen:
            model = 0.5 * model - value
            staleness.append(version - pulled_version)
            version += 1

    # One after another, so that the number of the step can be the time.
    for now, seconds in enumerate([NEVER, 0, NEVER, 0, 0, NEVER, -1, NEVER, 0, 0]):
        delay.assign(seconds)
        apply([entry for entry in waiting if decisions.is_delay_over(now, entry[2], entry[3])])
        waiting = [entry for entry in waiting if not decisions.is_delay_over(now, entry[2], entry[3])]
        assert step(now) == (version, model)
        waiting.append((now, version, now, seconds))
        assert len(entries(rule)) == len(waiting)
    assert rule.flush() == len(waiting) == 5
    apply(waiting)
    assert value_of(variables) == model
    assert rule.statistics().staleness.histogram == tuple(np.bincount(staleness))


@pytest.mark.long
def test_gradients_are_delayed_after_another_rule_and_applied_before_the_next_one(strategy, variables, tmp_path):
    rule = descent.new_rule(strategy, Synchronous, variables, grads_to_wait=2)
    step = new_step(strategy, rule, variables)
    step(1)
    delayed = make_rule(strategy, variables, NEVER)
    rule.switch_to(delayed)
    assert (value_of(variables), rule.version.numpy()) == (-1.0, 1)
    assert step(1) == (1, -1)
    checkpoint = tf.train.Checkpoint(rule=rule)
    path = checkpoint.write(str(tmp_path / "rule"))
    step(1)
    assert rule.flush() == 2
    checkpoint.read(path).assert_consumed()
    assert rule.version.numpy() == 1
    delayed.switch_to(descent.new_rule(strategy, "asynchronous", variables))
    # The model itself was not in the checkpoint.
    assert (value_of(variables), rule.version.numpy()) == (-4.0, 2)
    step(1)
    assert value_of(variables) == -5.0
    path = checkpoint.write(str(tmp_path / "after"))
    assert not [key for key, _ in tf.train.list_variables(path) if "queued" in key]


def test_a_delay_must_be_seconds_or_a_function(strategy, variables):
    for delay, error, said in (
        (-0.1, ValueError, "delay must be a number of seconds of at least 0, .*, got -0.1"),
        (math.nan, ValueError, "delay must be a number of seconds of at least 0, .*, got nan"),
        (True, TypeError, "delay must be a number of seconds .*, or a function"),
        ("1", TypeError, "delay must be a number of seconds .*, or a function"),
    ):
        with pytest.raises(error, match=said):
            descent.new_rule(strategy, Delayed, variables, delay=delay)
