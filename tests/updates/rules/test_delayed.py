"""Tests of delayed gradients: a pull applies those whose delay is over, in the order of pushes; none is lost."""

import math

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Delayed, decisions
from tests.updates.descent import descend, new_rule, pushing_step, run, value_of
from tests.updates.parts_of_rules import log_of

NEVER = math.inf


def make_rule(strategy, variables, delay, update=descend):
    """Returns a rule that subtracts the pushed gradients."""
    return new_rule(strategy, Delayed, variables, update, delay=delay)


def new_step(strategy, rule, variables):
    """Returns a step that pushes a number for each variable, and returns the pulled version and the value before."""

    @tf.function
    def step(value):
        with rule.pull() as version:
            found = variables[-1].read_value()[0, 0]
        rule.push([tf.fill(variable.shape, value) for variable in variables], version)
        return version, found

    return lambda value: tuple(float(number) for number in run(strategy, step, 0, tf.constant(float(value))))


def entries(rule):
    """Returns the entries of the queued pushes, those that are due first."""
    return log_of(rule).entries().numpy()


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
def test_queued_gradients_of_any_kind_are_in_a_checkpoint(strategy, tmp_path):
    with strategy.scope():
        dense, table = model = [tf.Variable(lambda: tf.zeros([3])), tf.Variable(lambda: tf.zeros([5, 2]))]
    rule, again = (new_rule(strategy, Delayed, model, delay=NEVER, embeddings=[table]) for _ in range(2))

    def push_of(rule):
        def gradients(value, ids):
            return [tf.fill([3], value), tf.IndexedSlices(tf.fill([tf.size(ids), 2], value), ids)]

        step = pushing_step(rule, gradients)
        return lambda value, ids: run(strategy, step, 0, tf.constant(value), tf.constant(ids))

    for value, ids in ((1.0, [0, 3]), (4.0, [3, 3])):
        push_of(rule)(value, ids)
    run(strategy, pushing_step(rule, [tf.ones([3]), None]), 0)
    path = tf.train.Checkpoint(rule=rule, model=model).save(str(tmp_path / "saved"))
    saved = rule.statistics()
    # Another program's rule, with a queued push that is not in the checkpoint.
    push_of(again)(1000.0, [1, 2])
    tf.train.Checkpoint(rule=again, model=model).restore(path).assert_consumed()
    assert again.statistics() == saved
    np.testing.assert_array_equal(entries(again)[:, 3:], entries(rule)[:, 3:])
    assert again.flush() == 3
    assert value_of([dense]) == -6.0
    assert table.numpy().tolist() == [[-1, -1], [0, 0], [0, 0], [-9, -9], [0, 0]]


def test_a_checkpoint_for_other_variables_is_refused(strategy, variables, tmp_path):
    rule, other = (new_rule(strategy, Delayed, given, delay=NEVER) for given in (variables, variables[:1]))
    path = tf.train.Checkpoint(rule=rule).write(str(tmp_path / "rule"))
    with pytest.raises(ValueError, match="saved by a rule for other variables"):
        tf.train.Checkpoint(rule=other).read(path)


def test_a_delay_must_be_seconds_or_a_function(strategy, variables):
    for delay, error, said in (
        (-0.1, ValueError, "delay must be a number of seconds of at least 0, .*, got -0.1"),
        (math.nan, ValueError, "delay must be a number of seconds of at least 0, .*, got nan"),
        (True, TypeError, "delay must be a number of seconds .*, or a function"),
        ("1", TypeError, "delay must be a number of seconds .*, or a function"),
    ):
        with pytest.raises(error, match=said):
            new_rule(strategy, Delayed, variables, delay=delay)
