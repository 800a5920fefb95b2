"""Tests of the state of a rule on its home server, and of its counters."""

import pytest
import tensorflow as tf

from coordinator.updates.rule_state import COUNTS, MAX_STALENESS, RuleState, RuleStatistics
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import run


@pytest.fixture
def state(strategy):
    with strategy.scope():
        return RuleState()


def test_the_whole_rule_state_is_on_one_server_with_a_lock_of_its_own(strategy, state):
    variables = [*state.variables, *vars(state.workers).values()]
    assert {variable.device for variable in variables} == {state.home}
    assert len(variables) == 8
    with strategy.scope():
        other = RuleState()
    assert other.number != state.number

    @tf.function(autograph=False)
    def both():
        with state.lock.hold():
            one = state.version.assign_add(1)
        with other.lock.hold([one]):
            return one + other.version.read_value()

    assert run(strategy, both) == 1


def test_counters_are_incremented_by_name_and_none_is_lost(strategy, state):
    @tf.function(autograph=False)
    def step():
        state.count(pulls=1, bytes_pulled=tf.constant(2**40, tf.int64))
        state.count(rejected=tf.constant(True), updates=2)
        for staleness in (0, 3, 3, MAX_STALENESS, MAX_STALENESS + 1, 2**40, -1):
            state.count(staleness=tf.constant(staleness, tf.int64))

    for _ in range(30):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    found = RuleStatistics.of(state)
    expected = {"pulls": 30, "bytes_pulled": 30 * 2**40, "rejected": 30, "updates": 60}
    assert {name: getattr(found, name) for name in COUNTS} == {name: expected.get(name, 0) for name in COUNTS}
    histogram = {slot: count for slot, count in enumerate(found.staleness.histogram) if count}
    assert histogram == {0: 60, 3: 60, MAX_STALENESS: 90}
