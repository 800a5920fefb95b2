"""Tests of delayed gradients: a pull applies those whose delay is over, in the order of pushes; none is lost."""

import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, Delayed, Synchronous, decisions
from tests.updates.descent import descend, value_of
from tests.updates.rules.delayed_steps import TIMEOUT, entries, make_rule, new_step
from tests.updates.small_model import loss_and_gradients, new_model

NEVER = math.inf


def halve_and_descend(variable, gradient, rate):
    """An update function whose result depends on the order of the gradients."""
    variable.assign(0.5 * variable - rate * gradient)


@pytest.mark.long
def test_nothing_is_applied_before_the_delay_is_over_and_flush_applies_all_in_order(strategy, variables):
    rule = make_rule(strategy, variables, NEVER, halve_and_descend)
    step = new_step(strategy, rule, variables)
    assert [step(value) for value in (1, 2, 3)] == [(0, 0)] * 3
    assert value_of(variables) == 0.0
    assert (rule.statistics().updates, rule.statistics().pushes) == (0, 3)
    assert rule.flush() == 3
    expected = 0.0
    for value in (1, 2, 3):
        expected = 0.5 * expected - value
    assert value_of(variables) == expected
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (3, 3, 0)
    # Versions 0, 1 and 2 when they were applied, and 0 when they were pulled.
    assert statistics.staleness.histogram == (1, 1, 1)
    assert sum(statistics.clocks.values()) == 3
    assert rule.flush() == 0


@pytest.mark.long
def test_without_delay_the_next_pull_has_every_gradient_as_if_asynchronous(strategy, variables):
    rule = make_rule(strategy, variables, 0, halve_and_descend)
    step = new_step(strategy, rule, variables)
    expected = 0.0
    for number in range(5):
        assert step(number + 1) == (number, expected)
        expected = 0.5 * expected - (number + 1)
    assert rule.flush() == 1
    assert value_of(variables) == expected
    assert rule.statistics().staleness.histogram == (5,)


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
def test_a_gradient_is_applied_once_its_seconds_are_over(strategy, variables):
    rule = make_rule(strategy, variables, 0.5)
    step = new_step(strategy, rule, variables)
    step(0)
    began = time.monotonic()
    step(1)
    pushed = time.monotonic()
    pushes = 2
    while step(0)[1] == 0.0:
        pushes += 1
        assert time.monotonic() < pushed + TIMEOUT
    # Pushed after it began; later gradients may be due as well by now, but change nothing.
    assert time.monotonic() - began >= 0.5
    assert rule.statistics().updates >= 2
    assert value_of(variables) == -1.0


@pytest.mark.long
def test_the_delay_may_depend_on_the_worker(strategy, variables):
    rule = make_rule(strategy, variables, lambda worker, time: 1e6 if worker == 1 else 0.0)
    step = new_step(strategy, rule, variables)
    step(1, worker=1)
    step(10, worker=0)
    step(100, worker=1)
    assert step(0, worker=2) == (1, -10)
    assert rule.flush() == 3
    assert value_of(variables) == -111.0


@pytest.mark.long
def test_the_delay_may_depend_on_the_time_and_be_random(strategy, variables):
    began = time.time()

    def delay(_, now):
        return tf.where(tf.abs(now - began) < 1000, tf.random.uniform([], 1e5, 2e5), 0.0)

    seen = make_rule(strategy, variables, delay)
    step = new_step(strategy, seen, variables)
    for _ in range(3):
        step(1)
    delays = entries(seen)[:, -1] / 1e6
    assert ((delays >= 1e5) & (delays <= 2e5)).all()
    assert len(set(delays)) == 3
    assert value_of(variables) == 0.0


@pytest.mark.long
def test_adam_with_delayed_gradients_equals_adam_in_one_process(strategy):
    batches = list(tf.random.stateless_normal([6, 8, 4], [5, 7]))
    with strategy.scope():
        model, optimizer = new_model(), keras.optimizers.Adam(0.1)
        rule = Delayed(optimizer, model.trainable_variables, delay=NEVER)

    @tf.function
    def step(x):
        with rule.pull() as version:
            _, gradients = loss_and_gradients(model, x)
        return rule.push(gradients, version)

    alone, adam = new_model(), keras.optimizers.Adam(0.1)
    for some in (batches[:3], batches[3:]):
        for x in some:
            assert strategy.schedule(step, args=(x,), worker=0).result(TIMEOUT)
        assert rule.flush() == 3
        iterations, pushed = int(adam.iterations.numpy()), [loss_and_gradients(alone, x)[1] for x in some]
        for gradients in pushed:
            # Each is applied with the iteration count that its step has pulled.
            adam.iterations.assign(iterations)
            adam.apply(gradients, alone.trainable_variables)
        adam.iterations.assign(iterations + 3)
    for shared, own in zip(model.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(shared.numpy(), own.numpy(), rtol=2e-4, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == 6 == rule.version.numpy()


@pytest.mark.long
def test_queued_gradients_are_applied_when_another_rule_follows_and_not_saved(strategy, variables, tmp_path):
    rule = make_rule(strategy, variables, NEVER)
    with strategy.scope():
        asynchronous = Asynchronous(descend, variables, learning_rate=1.0)
    step = new_step(strategy, rule, variables)
    for _ in range(3):
        step(1)
    rule.switch_to(asynchronous)
    assert (value_of(variables), rule.version.numpy()) == (-3.0, 3)
    step(1)
    assert value_of(variables) == -4.0
    assert rule.flush() == 0
    path = tf.train.Checkpoint(rule=rule).write(str(tmp_path / "rule"))
    assert not [key for key, _ in tf.train.list_variables(path) if "queued" in key]


@pytest.mark.long
def test_gradients_are_delayed_after_another_rule_and_its_checkpoint_has_them(strategy, variables, tmp_path):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)
    step = new_step(strategy, rule, variables)
    step(1)
    rule.switch_to(make_rule(strategy, variables, NEVER))
    assert (value_of(variables), rule.version.numpy()) == (-1.0, 1)
    assert step(1) == (1, -1)
    checkpoint = tf.train.Checkpoint(rule=rule)
    path = checkpoint.write(str(tmp_path / "rule"))
    step(1)
    assert rule.flush() == 2
    checkpoint.read(path).assert_consumed()
    assert rule.version.numpy() == 1
    assert rule.flush() == 1
    # The model itself was not in the checkpoint.
    assert value_of(variables) == -4.0


@pytest.mark.parametrize(
    ("delay", "error", "said"),
    [
        (-0.1, ValueError, "delay must be a number of seconds of at least 0, .*, got -0.1"),
        (math.nan, ValueError, "delay must be a number of seconds of at least 0, .*, got nan"),
        (True, TypeError, "delay must be a number of seconds .*, or a function"),
        ("1", TypeError, "delay must be a number of seconds .*, or a function"),
        (None, TypeError, "delay must be a number of seconds .*, or a function"),
    ],
)
def test_a_delay_must_be_seconds_or_a_function(strategy, variables, delay, error, said):
    with strategy.scope(), pytest.raises(error, match=said):
        Delayed(descend, variables, delay=delay, learning_rate=1.0)
