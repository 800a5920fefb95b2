"""Tests of bounded delay: staleness is bounded, nothing is rejected, and no worker waits for a dead one."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import BoundedDelay
from tests.deadline import wait_until
from tests.updates.descent import TIMEOUT, held, mostly_long, new_rule, pushing_step, value_of


@pytest.fixture
def make_rule(strategy, variables):
    return lambda **settings: new_rule(strategy, BoundedDelay, variables, **settings)


def step_of(rule, variables):
    return pushing_step(rule, [tf.ones_like(variable) for variable in variables])


@pytest.mark.parametrize(("max_delay", "grads_to_wait"), mostly_long([(0, 2), (1, 1)], (1, 1)))
def test_no_gradient_is_older_than_max_delay_and_none_is_rejected(
    strategy, variables, make_rule, may_end, max_delay, grads_to_wait
):
    rule, count = make_rule(max_delay=max_delay, grads_to_wait=grads_to_wait), 12
    step, slow = step_of(rule, variables), held(strategy, rule, variables, may_end)
    futures = [strategy.schedule(step, worker=1) for _ in range(count - 1)]
    # The other one waits while the slow one has a gradient in flight that would become too old.
    wait_until(lambda: rule.state.workers.is_waiting.numpy()[1])
    assert not all(future.done() for future in futures)
    may_end.assign(True)
    assert all(future.result(TIMEOUT) for future in (slow, *futures))
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert (statistics.pushes, statistics.rejected, statistics.updates) == (count, 0, count // grads_to_wait)
    assert statistics.staleness.count == count
    assert statistics.staleness.max <= max_delay
    assert value_of(variables) == -count / grads_to_wait
    assert statistics.idle_shares[0] == 0 < statistics.idle_shares[1] <= 1


@pytest.mark.long
def test_no_worker_waits_if_the_delay_is_unlimited(strategy, variables, make_rule, may_end):
    rule = make_rule(max_delay=None)
    slow, step = held(strategy, rule, variables, may_end), step_of(rule, variables)
    for future in [strategy.schedule(step, worker=1) for _ in range(15)]:
        future.result(TIMEOUT)
    assert not slow.done()
    may_end.assign(True)
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert set(statistics.idle_shares.values()) == {0.0}
    assert (statistics.updates, statistics.rejected, statistics.staleness.max) == (16, 0, 15)
    assert value_of(variables) == -16.0


def test_zero_delay_with_all_workers_in_an_update_equals_one_process(strategy, variables, make_rule):
    rule = make_rule(max_delay=0, grads_to_wait=2, learning_rate=0.25)
    step = pushing_step(rule, lambda: [variable - 1.0 for variable in variables])
    for _ in range(20):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, 1 - 0.75**10), rtol=1e-5)
    assert rule.version.numpy() == 10


@pytest.mark.long
def test_no_worker_waits_for_an_abandoned_call(strategy, variables, make_rule):
    rule = make_rule(max_delay=0)
    step, fence = step_of(rule, variables), rule.state.workers.fence
    fence.assign(tf.fill(fence.shape, tf.constant(2**40, tf.int64)))
    for raises in (strategy.schedule(step, worker=0).result, strategy.join):
        with pytest.raises(tf.errors.InvalidArgumentError, match="its worker has a newer one"):
            raises(TIMEOUT)
    fence.assign(tf.zeros_like(fence))
    assert strategy.schedule(step, worker=1).result(TIMEOUT)
