"""Tests that steps of an update rule are fused if none of them may wait for another worker."""

import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, BoundedDelay, ModelAverage, StaleSynchronous, Synchronous
from tests.ps_strategy.fusing.fused_calls import COUNT, FusedCalls
from tests.updates.descent import descend
from tests.updates.parts_of_rules import model_of


@pytest.fixture
def fused(strategy, monkeypatch):
    return FusedCalls(strategy, monkeypatch)


def test_steps_of_the_asynchronous_rule_are_fused_and_counted_separately(strategy, fused):
    rule, step = rule_and_step(strategy, lambda variables: Asynchronous(descend, variables, learning_rate=1.0))
    fused.run(step, [()] * COUNT)
    statistics = rule.statistics()
    assert (int(rule.version.numpy()), statistics.updates, statistics.pushes) == (COUNT, COUNT, COUNT)
    assert model_of(rule).variables[0].numpy() == -COUNT
    assert fused.sizes


RULES_THAT_WAIT = {
    "bounded delay": lambda variables: BoundedDelay(descend, variables, max_delay=2, learning_rate=1.0),
    "synchronous": lambda variables: Synchronous(descend, variables, grads_to_wait=1, learning_rate=1.0),
    "stale synchronous": lambda variables: StaleSynchronous(
        descend, variables, get_model_frequency=3, max_lead=4, learning_rate=1.0
    ),
    "model average": lambda variables: ModelAverage(descend, variables, learning_rate=1.0),
}


# One by default: the rules disable fusing in one place.
@pytest.mark.long
@pytest.mark.parametrize("name", RULES_THAT_WAIT)
def test_steps_of_a_rule_that_may_wait_are_not_fused(strategy, fused, name):
    _, step = rule_and_step(strategy, RULES_THAT_WAIT[name])
    inner = tf.function(step.python_function)

    @tf.function
    def outer():
        return tf.cond(tf.constant(True) & (tf.timestamp() > 0.0), inner, lambda: tf.constant(0.0))

    fused.run(step, [()] * 4)
    fused.run(outer, [()] * COUNT)
    assert not fused.sizes


def rule_and_step(strategy, make):
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
        rule = make(variables)

    @tf.function
    def step():
        with rule.pull() as version:
            value = variables[0] + 0.0
        rule.push([tf.constant(1.0), tf.constant(1.0)], version)
        return value

    return rule, step
