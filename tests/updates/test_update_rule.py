"""Tests of what is common to all rules: pull, push and run, their errors, and which steps are fused."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.fusing.repeated_function import may_be_fused
from coordinator.updates import Asynchronous
from tests.ps_strategy.every_worker import concrete_function
from tests.ps_strategy.fusing.fused_calls import COUNT, FusedCalls
from tests.updates.descent import descend, new_rule, pushing_step, run, value_of


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return [tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)]


@pytest.fixture
def rule(strategy, variables):
    with strategy.scope():
        return Asynchronous(descend, variables, learning_rate=0.5)


def result(strategy, step, *args):
    return run(strategy, step, 0, *args)


def test_pull_gives_the_version_and_push_whether_it_was_accepted(strategy, rule, variables):
    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [2.0 * variable for variable in variables]
        accepted = rule.push(gradients, version)
        assert (version.dtype, version.shape) == (tf.int64, ())
        assert (accepted.dtype, accepted.shape) == (tf.bool, ())
        return version, accepted

    assert [result(strategy, step) for _ in range(3)] == [(0, True), (1, True), (2, True)]
    assert rule.version.numpy() == 3
    assert [variable.numpy() for variable in variables] == [0.0, 0.0, 0.0]


def test_a_push_may_be_inside_its_pull_in_another_function_and_of_some_variables(strategy, rule, variables):
    @tf.function
    def push(gradients, version):
        return rule.push(gradients, version)

    @tf.function
    def step():
        with rule.pull():
            rule.push([tf.constant(1.0)] * 3, 0)
            found = variables[0] + 0.0
        with rule.pull() as version, tf.GradientTape() as tape:
            loss = variables[1] * 4.0
        push(tape.gradient(loss, variables), version)
        return found

    assert result(strategy, step) == 1.0
    assert [variable.numpy() for variable in variables] == [0.5, -0.5, 2.5]
    assert rule.statistics().updates == 2


def test_steps_in_a_loop_see_each_others_updates(strategy, rule, variables):
    @tf.function
    def steps():
        total = tf.constant(0, tf.int64)
        for _ in tf.range(10):
            with rule.pull() as version:
                with tf.GradientTape() as tape:
                    loss = variables[0] ** 2 + variables[1] + variables[2]
                gradients = tape.gradient(loss, variables)
            rule.push([0.5 * gradients[0], gradients[1], gradients[2]], version)
            total += version
        return total

    assert result(strategy, steps) == sum(range(10))
    np.testing.assert_allclose([variable.numpy() for variable in variables], [0.5**10, -3.0, -2.0])
    assert rule.statistics().staleness.histogram == (10,)


class RejectingTwice(Asynchronous):
    """A rule that reports a rejected gradient at the first two attempts."""

    @property
    def may_reject(self):
        return True

    def _push(self, gradients, pulled):
        super()._push(gradients, pulled)
        return self.state.version.read_value() % 3 == 0


def test_run_repeats_a_step_on_the_same_batch_until_it_is_accepted(strategy, variables):
    with strategy.scope():
        rule = RejectingTwice(descend, variables, learning_rate=0.5)

    @tf.function
    def step(x, y):
        return rule.run(lambda x, y: ({"x": x + y, "first": variables[0] + 0.0}, [x, y, x]), x, y)

    # The second attempt sees the changes of the first.
    assert result(strategy, step, tf.constant(1.0), tf.constant(2.0)) == {"x": 3.0, "first": 0.0}
    assert [variable.numpy() for variable in variables] == [-0.5, -1.0, 1.5]
    assert rule.statistics().pulls == 3


def test_a_rule_is_created_in_the_scope_and_pulls_and_pushes_inside_a_function(rule, variables):
    for scope in (tf.distribute.get_strategy().scope, tf.distribute.OneDeviceStrategy("/cpu:0").scope):
        with scope(), pytest.raises(RuntimeError, match=r"created inside strategy.scope\(\)"):
            Asynchronous(descend, variables, learning_rate=0.5)
    with pytest.raises(RuntimeError, match=r"rule.pull\(\) is used inside a tf.function"), rule.pull():
        pass
    with pytest.raises(RuntimeError, match=r"rule.push\(\) is used inside a tf.function"):
        rule.push([tf.constant(1.0)] * 3, 0)


def test_methods_of_a_rule_first_check_whether_the_strategy_is_closed(strategy, variables, monkeypatch):
    rules = [new_rule(strategy, name, variables) for name in ("asynchronous", "synchronous", "model average")]

    def refuse(what: str) -> None:
        raise coordinator.StrategyClosedError(what)

    services = dataclasses.replace(strategy.extended.services, refuse_closed=refuse)
    monkeypatch.setattr(strategy.extended, "services", services)
    for rule in rules:
        calls = {"statistics": (), "switch_to": (rules[0],)}
        calls |= {name: () for name in ("flush", "abort", "resume") if hasattr(rule, name)}
        for name, arguments in calls.items():
            with pytest.raises(coordinator.StrategyClosedError, match=rf"rule\.{name}\(\) .* before strategy.close"):
                getattr(rule, name)(*arguments)


def test_steps_are_fused_and_counted_separately_unless_they_may_wait(strategy, monkeypatch):
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable([0.0])]
    fused, rule, waiting = (
        FusedCalls(strategy, monkeypatch),
        *(new_rule(strategy, name, variables) for name in ("asynchronous", "stale synchronous")),
    )
    gradients = [tf.ones_like(variable) for variable in variables]
    fused.run(pushing_step(rule, gradients), [()] * COUNT)
    assert fused.sizes
    assert sum(rule.statistics().clocks.values()) == rule.statistics().updates == COUNT
    assert value_of(variables) == -COUNT
    inner = tf.function(pushing_step(waiting, gradients).python_function)

    # Also if the step is called in a branch of another function.
    @tf.function
    def outer():
        return tf.cond(tf.constant(True) & (tf.timestamp() > 0.0), inner, lambda: tf.constant(False))

    assert not may_be_fused(concrete_function(strategy, outer))
    assert all(new_rule(strategy, name, variables).may_wait for name in ("synchronous", "bounded delay", "delayed"))
