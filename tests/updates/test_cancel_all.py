"""Tests that steps that are cancelled at any point leave whole updates, no lock held and no worker waiting."""

import random
import threading

import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, BoundedDelay, Delayed, ModelAverage, StaleSynchronous, Synchronous
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.updates.descent import descend

TIMEOUT = 120.0
WORKERS = 3
ROUNDS = 5

# Each rule, whether an update is made on all servers or on none, and the most staleness that it allows.
RULES = {
    "synchronous": (lambda variables: Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0), True, None),
    "bounded delay": (lambda variables: BoundedDelay(descend, variables, max_delay=1, learning_rate=1.0), True, 1),
    "bulk synchronous": (
        lambda variables: BoundedDelay(descend, variables, max_delay=0, grads_to_wait=3, learning_rate=1.0),
        True,
        0,
    ),
    "stale synchronous": (
        lambda variables: StaleSynchronous(descend, variables, get_model_frequency=2, max_lead=1, learning_rate=1.0),
        False,
        None,
    ),
    "model average": (lambda variables: ModelAverage(descend, variables, learning_rate=1.0), False, None),
    "delayed": (lambda variables: Delayed(descend, variables, delay=0.02, learning_rate=1.0), True, None),
    "asynchronous": (lambda variables: Asynchronous(descend, variables, learning_rate=1.0), False, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_after_cancelled_steps_a_rule_trains_on(strategy, variables, name):
    make_rule, is_whole, most_staleness = RULES[name]
    chance, moment = random.Random(3), threading.Event()
    with strategy.scope():
        rule = make_rule(variables)

    def body():
        with tf.control_dependencies([pause(tf.random.uniform([], 0.0, 0.01, tf.float64))]):
            return tf.constant(0.0), [-tf.ones_like(variable) for variable in variables]

    step = tf.function(lambda: rule.run(body))
    for number in range(ROUNDS):
        pushes = rule.statistics().pushes
        futures = [strategy.schedule(step) for _ in range(60)]
        wait_until(lambda before=pushes: rule.statistics().pushes > before, TIMEOUT)
        moment.wait(chance.uniform(0.0, 0.05))
        strategy.cancel_all()
        assert all(future.done() for future in futures)
        # One worker alone must not wait for those that were cancelled.
        trained = [strategy.schedule(step, worker=number % WORKERS) for _ in range(WORKERS)]
        strategy.join(TIMEOUT)
        assert all(future.exception(0) is None for future in trained)
    statistics = rule.statistics()
    assert statistics.pushes > ROUNDS * WORKERS
    if is_whole:
        assert {float(value) for variable in variables for value in variable.numpy().ravel()} == {statistics.updates}
    assert most_staleness is None or statistics.staleness.max <= most_staleness
