"""Tests that steps of an update rule are fused if none of them may wait for another worker."""

import pytest
import tensorflow as tf

from tests.ps_strategy.fusing.fused_calls import COUNT, FusedCalls
from tests.updates.descent import new_rule, value_of


# One that waits: the rules disable fusing in one place.
@pytest.mark.parametrize(("name", "is_fused"), [("asynchronous", True), ("bounded delay", False)])
def test_steps_are_fused_and_counted_separately_unless_they_may_wait(strategy, variables, monkeypatch, name, is_fused):
    fused, rule = FusedCalls(strategy, monkeypatch), new_rule(strategy, name, variables)

    @tf.function
    def step():
        with rule.pull() as version:
            value = variables[0][0]
        rule.push([tf.ones_like(variable) for variable in variables], version)
        return value

    inner = tf.function(step.python_function)

    @tf.function
    def outer():
        return tf.cond(tf.constant(True) & (tf.timestamp() > 0.0), inner, lambda: tf.constant(0.0))

    fused.run(step if is_fused else outer, [()] * COUNT)
    assert bool(fused.sizes) == is_fused
    assert sum(rule.statistics().clocks.values()) == COUNT
    if is_fused:
        assert (rule.statistics().updates, value_of(variables)) == (COUNT, -COUNT)
