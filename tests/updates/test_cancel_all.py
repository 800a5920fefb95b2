"""Tests that steps that are cancelled at any point leave whole updates, no lock held and no worker waiting."""

import random
import threading

import pytest
import tensorflow as tf

from coordinator.updates import BoundedDelay, ModelAverage, StaleSynchronous, Synchronous
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.updates.descent import TIMEOUT, new_rule, value_of

WORKERS, ROUNDS = 2, 5

# Each rule, whether an update is made on all servers or on none, and the most staleness that it allows.
RULES = {
    "synchronous": (Synchronous, {"grads_to_wait": 2}, True, None),
    "bounded delay": (BoundedDelay, {"max_delay": 0, "grads_to_wait": 2}, True, 0),
    "stale synchronous": (StaleSynchronous, {"get_model_frequency": 2, "max_lead": 1}, False, None),
    "model average": (ModelAverage, {}, False, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_after_cancelled_steps_a_rule_trains_on(strategy, variables, name):
    kind, settings, is_whole, most_staleness = RULES[name]
    chance, moment, rule = random.Random(3), threading.Event(), new_rule(strategy, kind, variables, **settings)

    def body():
        with tf.control_dependencies([pause(tf.random.uniform([], 0.0, 0.01, tf.float64))]):
            return tf.constant(0.0), [-tf.ones_like(variable) for variable in variables]

    step = tf.function(lambda: rule.run(body))
    for number in range(ROUNDS):
        pushes = rule.statistics().pushes
        futures = [strategy.schedule(step) for _ in range(60)]
        wait_until(lambda before=pushes: rule.statistics().pushes > before, TIMEOUT)
        # At any point of a step.
        moment.wait(chance.uniform(0.0, 0.05))
        strategy.cancel_all()
        assert all(future.done() for future in futures)
        # One worker alone must not wait for those that were cancelled.
        trained = [strategy.schedule(step, worker=number % WORKERS) for _ in range(WORKERS)]
        strategy.join(TIMEOUT)
        assert all(future.exception(0) is None for future in trained)
    statistics = rule.statistics()
    assert statistics.pushes > ROUNDS * WORKERS
    assert not is_whole or value_of(variables) == statistics.updates
    assert most_staleness is None or statistics.staleness.max <= most_staleness
