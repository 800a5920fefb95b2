"""Tests of model averaging while a worker is dead: it is not waited for, and begins again with the shared model."""

import pytest
import tensorflow as tf

from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.rules.averaging_steps import NEVER, ascent, make_rule, poll_until, run

pytestmark = pytest.mark.release


def test_a_dead_worker_is_left_out_and_starts_with_the_shared_model_on_return(strategy, shared_cluster, weights, turn):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)

    @tf.function
    def average_and_wait():
        with rule.pull() as version:
            found = weights[1].read_value()
            gradients = [tf.zeros_like(weight) for weight in weights]
        with tf.control_dependencies([rule.push(gradients, version)]):
            turn.assign_add(1)
            poll_until(lambda: turn.read_value() > 1)
        return found

    run(strategy, step, 0)
    waiting = strategy.schedule(average_and_wait, worker=1)
    wait_until(lambda: turn.numpy() == 1)
    shared_cluster.kill("worker", 1)
    try:
        # The model of the dead one is not below 0: a mean with it would stay above twice the step.
        wait_until(lambda: run(strategy, step, 0, -100.0) < -1000)
        turn.assign(2)
    finally:
        shared_cluster.restart("worker", 1)
    assert waiting.result(TIMEOUT) < -500


def test_abort_does_not_wait_for_a_worker_that_is_dead(strategy, shared_cluster, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    for worker, by in enumerate((2.0, 50.0)):
        run(strategy, step, worker, by)
    shared_cluster.kill("worker", 1)
    try:
        wait_until(lambda: strategy.cluster.statistics().workers[1].state == "lost")
        rule.abort(TIMEOUT)
        assert weights[1].numpy() == 2
    finally:
        shared_cluster.restart("worker", 1)
    assert run(strategy, step, 1) == 2
