"""Tests of replacing a rule by another one during training."""

import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, Synchronous
from tests.deadline import LIMIT
from tests.ps_strategy.every_worker import concrete_function, on_every_worker
from tests.updates.descent import new_rule, pushing_step, value_of


@pytest.fixture
def rules(strategy, variables):
    """Rules whose steps add 1, 10 and 100."""
    return [new_rule(strategy, Asynchronous, variables, learning_rate=rate) for rate in (1.0, 10.0, 100.0)]


def step_of(rule, variables):
    return pushing_step(rule, [-tf.ones_like(variable) for variable in variables])


def train(strategy, step, times):
    for _ in range(times):
        strategy.schedule(step)
    strategy.join()


def test_after_a_switch_steps_use_the_next_rule_and_counters_continue(strategy, variables, rules):
    first, second, third = rules
    steps = [step_of(rule, variables) for rule in (first, second)]
    concrete = concrete_function(strategy, steps[0])
    for _ in range(20):
        strategy.schedule(steps[0])
    # What was scheduled before uses the former rule.
    first.switch_to(second)
    assert value_of(variables) == 20.0
    train(strategy, steps[0], 3)
    assert value_of(variables) == 50.0
    assert int(first.version) == int(second.version) == 23
    assert first.statistics() == second.statistics()
    # On any former rule.
    first.switch_to(third)
    for step in steps:
        train(strategy, step, 1)
    assert value_of(variables) == 250.0
    assert first.statistics().updates == 25
    # A concrete function keeps the rule that it was traced with.
    train(strategy, concrete, 1)
    assert value_of(variables) == 251.0


def test_no_function_runs_while_a_rule_is_replaced(strategy, variables, rules, monkeypatch):
    other, workers = tf.function(lambda: tf.constant(1)), range(len(strategy.cluster.workers))
    assert on_every_worker(strategy, other) == [1 for _ in workers]
    futures = []
    schedule_internal = strategy._scheduler.schedule_internal  # noqa: SLF001 - the library alone schedules so

    def finish() -> None:
        futures.extend(strategy.schedule(other) for _ in range(8))
        # Workers do so before they take other functions.
        for worker in workers:
            schedule_internal(worker, lambda context: None, "nothing").result(LIMIT)
        assert not any(future.done() for future in futures)

    monkeypatch.setattr(rules[0], "_finish", finish)
    rules[0].switch_to(rules[1])
    assert [future.result(LIMIT) for future in futures] == [1] * 8


@pytest.mark.long
def test_a_switch_to_and_from_synchronous_loses_no_waiting_gradient(strategy, variables, rules):
    synchronous = new_rule(strategy, Synchronous, variables, grads_to_wait=3)
    rules[0].switch_to(synchronous)
    gradients = [-tf.ones_like(variable) for variable in variables]
    step = tf.function(lambda: rules[0].run(lambda: (tf.constant(0.0), gradients)))
    train(strategy, step, 4)
    assert (value_of(variables), synchronous.statistics().updates) == (1.0, 1)
    synchronous.switch_to(rules[1])
    # The fourth gradient waited for others.
    assert (value_of(variables), synchronous.statistics().updates) == (2.0, 2)
    train(strategy, step, 2)
    assert (value_of(variables), rules[1].statistics().updates, synchronous.flush()) == (22.0, 4, 0)


def test_only_an_unused_rule_for_the_same_variables_may_follow_without_an_error(strategy, variables, rules):
    for others in (variables[:1], variables[::-1]):
        with pytest.raises(ValueError, match="same variables, in the same order"):
            rules[0].switch_to(new_rule(strategy, Asynchronous, others))
    with pytest.raises(ValueError, match="not used before"):
        rules[0].switch_to(rules[0])

    @tf.function
    def fail() -> None:
        tf.debugging.Assert(False, ["no"])

    strategy.schedule(fail)
    with pytest.raises(tf.errors.InvalidArgumentError):
        rules[0].switch_to(rules[1])
    # Nothing is switched.
    train(strategy, step_of(rules[0], variables), 1)
    assert value_of(variables) == 1.0
