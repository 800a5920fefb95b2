"""Tests of rules that users write: subclasses of `Accumulating` with the methods that are theirs to override."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Accumulating
from tests.updates.descent import new_rule, pushing_step, run, value_of


class Corrected(Accumulating):
    """Delay compensation: the gradient plus a multiple of what has changed since the pull."""

    sends_pulled_values = True

    def combine(self, variable, gradients, workers, pulled):
        assert workers.shape.rank == 1
        return tf.reduce_mean(gradients + 0.5 * gradients * gradients * (variable - pulled), 0)


class FreshMedian(Accumulating):
    """The median of three gradients. Rejects those more than one update old; counts them in its own variable."""

    def __init__(self, *model, **settings):
        super().__init__(*model, **settings)
        with tf.distribute.get_strategy().extended.colocate_vars_with(self.version):
            self.refused = tf.Variable(tf.zeros([8], tf.int64), trainable=False)

    def is_accepted(self, worker, pulled_version):
        if self.version - pulled_version > 1:  # converted by AutoGraph
            self.refused.scatter_nd_add([[worker]], [1])
            return False
        return True

    def combine(self, variable, gradients, workers, pulled):
        assert pulled is None
        return tf.sort(gradients, axis=0)[1]


@pytest.fixture
def make(strategy, variables):
    return lambda kind, **settings: new_rule(strategy, kind, variables, **settings)


def step_of(rule, variables, value):
    """Returns a step that pushes this value for each element."""
    return pushing_step(rule, [tf.fill(variable.shape, float(value)) for variable in variables])


@pytest.mark.long
def test_combine_gets_the_values_that_gradients_were_computed_on(strategy, variables, make):
    rule = make(Corrected, grads_to_wait=2)
    for _ in range(2):
        run(strategy, step_of(rule, variables, 2.0), worker=0)
    # Twice of 0 for 0: nothing has changed since the pull.
    assert value_of(variables) == -2.0

    @tf.function
    def late():
        with rule.pull() as version:
            gradients = [tf.fill(variable.shape, 2.0) for variable in variables]
            with tf.control_dependencies([variable.assign_add(tf.ones_like(variable)) for variable in variables]):
                gradients = [tf.identity(gradient) for gradient in gradients]
        return rule.push(gradients, version)

    run(strategy, late)
    run(strategy, late)
    # The first was computed on -2, the second on -1, and both are applied to 0: 2 + 0.5 * 4 * (2 or 1), 6 and 4.
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, -5.0))
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (2, 4, 0)


def test_combine_makes_one_gradient_of_several_and_what_is_not_accepted_is_in_none(strategy, variables, make):
    rule = make(FreshMedian, grads_to_wait=3)
    assert (rule.may_reject, rule.may_wait) == (True, True)

    @tf.function
    def push(value, version):
        return rule.push([tf.fill(variable.shape, value) for variable in variables], version)

    accepted = []
    for value, version in ((1, 0), (1000, 0), (3, 0), (2, 0), (2, 1), (2, 1), (100, 0), (-5, 2)):
        given = tf.constant(value, tf.float32), tf.constant(version, tf.int64)
        accepted.append(bool(run(strategy, push, 1, *given)))
    assert accepted == [True] * 6 + [False, True]
    assert value_of(variables) == -5.0
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (2, 8, 1)
    assert rule.refused.numpy().tolist() == [0, 1] + [0] * 6


class ClockAsAnswer(Accumulating):
    def may_begin(self, worker, clock):
        return clock


class ListAsAnswer(Accumulating):
    def is_accepted(self, worker, pulled_version):
        return [True]


class AllGradients(Accumulating):
    def combine(self, variable, gradients, workers, pulled):
        return gradients


def test_a_method_that_returns_something_else_is_named(strategy, variables, make):
    for kind, message in (
        (ClockAsAnswer, "ClockAsAnswer.may_begin must return a bool scalar, got .*int64"),
        (ListAsAnswer, "ListAsAnswer.is_accepted must return a bool scalar"),
        (AllGradients, r"AllGradients.combine must return float32 of shape \(3,\) .*first dimension has to go"),
    ):
        rule = make(kind)
        with pytest.raises(TypeError, match=message):
            strategy.schedule(step_of(rule, variables, 1.0))
        assert rule.statistics().pushes == 0


def test_pulled_values_need_the_pull_and_the_push_in_one_function(strategy, variables, make):
    rule, ones = make(Corrected), [tf.ones(variable.shape) for variable in variables]
    assert (rule.may_reject, rule.may_wait) == (False, False)
    step = tf.function(lambda version: rule.push(ones, version))
    with pytest.raises(ValueError, match=r"Call rule.pull\(\) and rule.push\(\) in one function"):
        strategy.schedule(step, args=(tf.constant(0, tf.int64),))
