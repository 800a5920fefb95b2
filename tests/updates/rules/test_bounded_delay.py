"""Tests of bounded delay: staleness is bounded, nothing is rejected, and no worker waits for a dead one."""

import time

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import BoundedDelay
from coordinator.updates.rule_state import NO_STEP, pause
from tests.deadline import wait_until
from tests.updates.descent import descend, mostly_long, value_of

TIMEOUT = 240


def new_step(rule, variables, slow_worker=-1):
    """Returns a whole step whose gradient is one, and which takes one worker longer."""

    @tf.function
    def step():
        with rule.pull() as version:
            worker = coordinator.get_current_worker_index()
            with tf.control_dependencies([version]):
                slow = pause(tf.where(worker == slow_worker, tf.constant(0.03, tf.float64), 0.0))
            with tf.control_dependencies([slow]):
                gradients = [tf.ones(variable.shape) for variable in variables]
        return rule.push(gradients, version)

    return step


@pytest.mark.parametrize(
    ("max_delay", "grads_to_wait"),
    mostly_long([(0, 1), (1, 2), (1, 1), (4, 1), (0, 3)], (1, 2)),
)
def test_no_gradient_is_older_than_max_delay_and_none_is_rejected(strategy, variables, max_delay, grads_to_wait):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=max_delay, grads_to_wait=grads_to_wait, learning_rate=1.0)
    step = new_step(rule, variables, slow_worker=0)
    futures = [strategy.schedule(step) for _ in range(18)]
    assert all(future.result(TIMEOUT) for future in futures)
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert (statistics.pushes, statistics.rejected, statistics.updates) == (18, 0, 18 // grads_to_wait)
    assert statistics.staleness.count == 18
    assert statistics.staleness.max <= max_delay
    assert value_of(variables) == -18.0 / grads_to_wait


def held_step(rule, variables, may_end):
    """Returns such a step that ends when a variable is true."""

    @tf.function
    def step():
        with rule.pull() as version:
            with tf.control_dependencies([version]):
                polls = tf.constant(0)
            while not may_end:
                with tf.control_dependencies([pause(tf.constant(0.01, tf.float64))]):
                    polls += 1
            with tf.control_dependencies([polls]):
                gradients = [tf.ones(variable.shape) for variable in variables]
        return rule.push(gradients, version)

    return step


@pytest.mark.long
def test_workers_are_idle_while_they_wait_for_the_slow_one(strategy, variables):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=0, learning_rate=1.0)
        may_end = tf.Variable(False, trainable=False)
    step, slow_step, workers = new_step(rule, variables), held_step(rule, variables, may_end), rule.state.workers
    began = time.monotonic()
    strategy.schedule(step, worker=1).result(TIMEOUT)
    # The other one starts while the slow worker has a gradient in flight.
    strategy.schedule(slow_step, worker=0)
    wait_until(lambda: workers.pulled_version.numpy()[0] != NO_STEP)
    strategy.schedule(step, worker=1)
    wait_until(lambda: workers.is_waiting.numpy()[1])
    # For a tenth of the time since its first step.
    enough = time.monotonic() + (time.monotonic() - began) / 10
    wait_until(lambda: time.monotonic() > enough)
    may_end.assign(True)
    strategy.join(TIMEOUT)
    shares = rule.statistics().idle_shares
    assert shares[1] > 0.01
    assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.long
@pytest.mark.parametrize("unbounded", mostly_long([float("inf"), None], float("inf")))
def test_no_worker_waits_if_the_delay_is_unlimited(strategy, variables, unbounded):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=unbounded, learning_rate=1.0)
    step = new_step(rule, variables, slow_worker=0)
    for _ in range(15):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert set(statistics.idle_shares.values()) == {0.0}
    assert (statistics.updates, statistics.rejected) == (15, 0)
    assert value_of(variables) == -15.0


def test_zero_delay_with_all_workers_in_an_update_equals_one_process(strategy, variables):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=0, grads_to_wait=3, learning_rate=0.25)

    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [variable - 1.0 for variable in variables]
        return rule.push(gradients, version)

    for _ in range(30):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    expected = 1 - 0.75**10
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, expected), rtol=1e-5)
    assert rule.version.numpy() == 10


@pytest.mark.release
@pytest.mark.parametrize("max_delay", [0, 2])
def test_no_worker_waits_for_a_dead_one(strategy, shared_cluster, variables, max_delay):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=max_delay, learning_rate=1.0)
    step = new_step(rule, variables, slow_worker=1)
    strategy.schedule(step).result(TIMEOUT)
    futures = [strategy.schedule(step) for _ in range(40)]
    try:
        # It is slow, so it has a gradient in flight when it dies.
        wait_until(lambda: rule.state.workers.pulled_version.numpy()[1] != NO_STEP)
        shared_cluster.kill("worker", 1)
        assert all(future.result(TIMEOUT) for future in futures)
        strategy.join(TIMEOUT)
    finally:
        shared_cluster.restart("worker", 1)
        wait_until(strategy.cluster.workers[1].healthy)
    statistics = rule.statistics()
    assert statistics.updates == statistics.pushes - statistics.rejected >= 41
    assert statistics.staleness.max <= max_delay
    assert value_of(variables) == -float(statistics.updates)


@pytest.mark.long
def test_no_worker_waits_for_a_step_that_failed_before_its_push(strategy, variables):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=0, learning_rate=1.0)

    @tf.function
    def failing():
        with rule.pull() as version:
            tf.debugging.assert_negative(version, "fails on purpose")
            gradients = [tf.ones(variable.shape) for variable in variables]
        return rule.push(gradients, version)

    strategy.schedule(failing)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fails on purpose"):
        strategy.join(TIMEOUT)
    step = new_step(rule, variables)
    futures = [strategy.schedule(step) for _ in range(6)]
    assert all(future.result(TIMEOUT) for future in futures)
    assert value_of(variables) == -6.0


@pytest.mark.long
def test_no_worker_waits_for_one_whose_data_has_ended(strategy, variables):
    def few_or_many(context):
        return tf.data.Dataset.range(10 if context.input_pipeline_id == 1 else 1)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(few_or_many))
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=0, grads_to_wait=3, learning_rate=1.0)

    @tf.function
    def step(iterator):
        with rule.pull() as version, tf.control_dependencies([version]):
            number = tf.cast(next(iterator), tf.float32)
            gradients = [tf.ones(variable.shape) + 0.0 * number for variable in variables]
        return rule.push(gradients, version)

    futures = [strategy.schedule(step, args=(iterator,)) for _ in range(12)]
    assert all(future.result(TIMEOUT) for future in futures)
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert (statistics.pushes, statistics.updates) == (12, 4)
    assert value_of(variables) == -4.0


@pytest.mark.parametrize("max_delay", [-1, 1.5, True, float("nan"), "1"])
def test_max_delay_is_an_integer_of_at_least_zero_or_infinity(strategy, variables, max_delay):
    with strategy.scope(), pytest.raises(ValueError, match="max_delay must be an integer of at least 0, or"):
        BoundedDelay(descend, variables, max_delay=max_delay, learning_rate=1.0)
