"""Tests of the lead of the stale synchronous rule: the steps that a worker may be ahead of the slowest."""

import pytest

from coordinator.updates import StaleSynchronous
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import descending_step, held, new_rule

WORKERS = 2


@pytest.fixture
def make_rule(strategy, weights):
    return lambda max_lead: new_rule(strategy, StaleSynchronous, weights, get_model_frequency=2, max_lead=max_lead)


def clocks(rule):
    return rule.state.clocks.numpy()[:WORKERS].tolist()


def waiting(rule):
    return rule.state.workers.is_waiting.numpy()[:WORKERS].tolist()


def test_workers_wait_at_max_lead_steps_ahead_of_the_slowest(strategy, weights, make_rule, may_end):
    rule = make_rule(2)
    step = descending_step(rule, weights)
    held(strategy, rule, weights, may_end)
    for _ in range(6):
        strategy.schedule(step, worker=1)
    wait_until(lambda: clocks(rule) == [0, 2] and waiting(rule) == [False, True])
    may_end.assign(True)
    strategy.join(TIMEOUT)
    # Worker 0 is idle, so no worker waits for it any longer.
    assert clocks(rule) == [1, 6]
    idle = rule.statistics().idle_shares
    assert idle[0] == 0 < idle[1]


@pytest.mark.long
def test_quiet_lets_a_worker_that_waits_for_a_slower_one_finish_its_step(strategy, weights, make_rule, may_end):
    rule = make_rule(1)
    step = descending_step(rule, weights)
    held(strategy, rule, weights, may_end)
    ahead = [strategy.schedule(step, worker=1) for _ in range(3)]
    wait_until(lambda: waiting(rule) == [False, True])
    may_end.assign(True)
    with strategy.quiet(TIMEOUT):
        # Worker 1 has ended the step at whose beginning it waited, and possibly the one after, but began no other.
        assert sum(clocks(rule)) == -weights[1].numpy()
        assert waiting(rule) == [False, False]
        with pytest.raises(RuntimeError, match="join was called inside"):
            strategy.join()
    strategy.join(TIMEOUT)
    assert all(future.done() for future in ahead)
    assert weights[1].numpy() == -4


def test_no_worker_waits_for_the_clock_of_one_that_joins_first(strategy, weights, make_rule, may_end):
    before, first, second = [10, 12, 11], 0, 1
    rule = make_rule(1)
    step = descending_step(rule, weights)
    # As after a restored checkpoint, or the end of an epoch: all are idle.
    rule.state.clocks.assign(before + [0] * (len(rule.state.clocks.numpy()) - len(before)))
    stopped = held(strategy, rule, weights, may_end, first)
    future = strategy.schedule(step, worker=second)
    try:
        wait_until(lambda: future.done() or waiting(rule)[second])
        assert not waiting(rule)[second]
    finally:
        may_end.assign(True)
    future.result(TIMEOUT)
    stopped.result(TIMEOUT)
    assert clocks(rule) == [max(before) + 1] * 2
