"""Tests of the lead of the stale synchronous rule: the steps that a worker may be ahead of the slowest."""

import pytest
import tensorflow as tf

from coordinator.updates import StaleSynchronous
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import descending_step, new_rule

WORKERS = 2


@pytest.fixture
def make_rule(strategy, weights):
    return lambda max_lead=None: new_rule(strategy, StaleSynchronous, weights, get_model_frequency=2, max_lead=max_lead)


class Stops:
    """A step that waits, when it has pulled, until it may continue.

    Args:
      strategy: whose workers it runs on.
      rule: whose step it is.
      weights: the rule's variables.
    """

    def __init__(self, strategy, rule, weights):
        self._strategy, self._rule, self._weights = strategy, rule, weights
        with strategy.scope():
            self._waits = [tf.Variable(False) for _ in range(WORKERS)]
            self._may_continue = [tf.Variable(False) for _ in range(WORKERS)]

    def stop(self, worker):
        """Schedules the step, and returns its future once it waits."""
        future = self._strategy.schedule(self._step, args=(tf.constant(worker),), worker=worker)
        wait_until(self._waits[worker].numpy)
        return future

    def release(self, worker):
        self._may_continue[worker].assign(True)

    @tf.function
    def _step(self, worker):
        with self._rule.pull() as version, tf.control_dependencies([version]):
            iterations = tf.switch_case(worker, [lambda number=number: self._wait(number) for number in range(WORKERS)])
        # Pushed when it has waited.
        one = 1.0 + 0.0 * tf.cast(iterations, tf.float32)
        self._rule.push([tf.ones_like(weight) * one for weight in self._weights], version)

    def _wait(self, number):
        self._waits[number].assign(True)
        iterations = 0
        while not self._may_continue[number]:
            iterations += 1 + pause(1e-2)
        return iterations


def clocks(rule):
    return rule.state.clocks.numpy()[:WORKERS].tolist()


def waiting(rule):
    return rule.state.workers.is_waiting.numpy()[:WORKERS].tolist()


@pytest.mark.parametrize("max_lead", [2, pytest.param(None, marks=pytest.mark.long)])
def test_workers_wait_at_max_lead_steps_ahead_of_the_slowest(strategy, weights, make_rule, max_lead):
    rule = make_rule(max_lead)
    step, stops = descending_step(rule, weights), Stops(strategy, rule, weights)
    stops.stop(0)
    for _ in range(6):
        strategy.schedule(step, worker=1)
    wait_until(lambda: clocks(rule) == [0, max_lead or 6] and waiting(rule) == [False, max_lead is not None])
    stops.release(0)
    strategy.join(TIMEOUT)
    # Worker 0 is idle, so no worker waits for it any longer.
    assert clocks(rule) == [1, 6]
    idle = rule.statistics().idle_shares
    assert idle[0] == 0
    assert (idle[1] > 0) == (max_lead is not None)


@pytest.mark.long
def test_quiet_lets_a_worker_that_waits_for_a_slower_one_finish_its_step(strategy, weights, make_rule):
    rule = make_rule(1)
    step, stops = descending_step(rule, weights), Stops(strategy, rule, weights)
    stops.stop(0)
    ahead = [strategy.schedule(step, worker=1) for _ in range(3)]
    wait_until(lambda: waiting(rule) == [False, True])
    stops.release(0)
    with strategy.quiet(TIMEOUT):
        # Worker 1 has ended the step at whose beginning it waited, and possibly the one after, but began no other.
        assert sum(clocks(rule)) == -weights[1].numpy()
        assert waiting(rule) == [False, False]
        with pytest.raises(RuntimeError, match="join was called inside"):
            strategy.join()
    strategy.join(TIMEOUT)
    assert all(future.done() for future in ahead)
    assert weights[1].numpy() == -4


@pytest.mark.parametrize(
    ("before", "first"), [([10, 12, 11], 0), pytest.param([0, 100, 100], 1, marks=pytest.mark.long)]
)
def test_no_worker_waits_for_the_clock_of_one_that_joins_first(strategy, weights, make_rule, before, first):
    rule, second = make_rule(1), 1 - first
    step, stops = descending_step(rule, weights), Stops(strategy, rule, weights)
    # As after a restored checkpoint, or the end of an epoch: all are idle.
    rule.state.clocks.assign(before + [0] * (len(rule.state.clocks.numpy()) - len(before)))
    stopped = stops.stop(first)
    future = strategy.schedule(step, worker=second)
    try:
        wait_until(lambda: future.done() or waiting(rule)[second])
        assert not waiting(rule)[second]
    finally:
        stops.release(first)
    future.result(TIMEOUT)
    stopped.result(TIMEOUT)
    assert clocks(rule) == [max(before) + 1] * 2
