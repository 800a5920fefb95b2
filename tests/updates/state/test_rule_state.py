"""Tests of the state of a rule on its home server, and of its counters."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates.rule_state import COUNTS, MAX_STALENESS, NO_CLOCK, RuleState, RuleStatistics
from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 120.0


@pytest.fixture
def state(strategy):
    with strategy.scope():
        return RuleState()


def result(strategy, step):
    return strategy.schedule(step).result(TIMEOUT)


def counts_of(state):
    return {name: getattr(RuleStatistics.of(state), name) for name in COUNTS}


def test_the_whole_rule_state_is_on_one_server(state):
    variables = [*state.variables, *vars(state.workers).values()]
    assert {variable.device for variable in variables} == {state.home}
    assert len(variables) == 8


def test_rule_states_have_different_locks(strategy, state):
    with strategy.scope():
        other = RuleState()
    assert other.number != state.number

    @tf.function(autograph=False)
    def both():
        with state.lock.hold():
            one = state.version.assign_add(1)
        with other.lock.hold([one]):
            return one + other.version.read_value()

    assert result(strategy, both) == 1


def test_steps_in_flight_are_in_no_checkpoint(state, tmp_path):
    path = tf.train.Checkpoint(state=state).write(str(tmp_path / "state"))
    saved = {name.split("/")[1] for name, _ in tf.train.list_variables(path) if name.startswith("state/")}
    assert saved == {"version", "counts", "clocks", "seconds"}


def test_counters_are_incremented_by_name(strategy, state):
    @tf.function(autograph=False)
    def step():
        state.count(pulls=1, bytes_pulled=tf.constant(2**40, tf.int64))
        state.count(rejected=tf.constant(True), updates=2)

    for _ in range(3):
        result(strategy, step)
    expected = {"pulls": 3, "bytes_pulled": 3 * 2**40, "rejected": 3, "updates": 6}
    assert counts_of(state) == {name: expected.get(name, 0) for name in COUNTS}


def test_racing_workers_lose_no_count(strategy, state):
    step = tf.function(lambda: state.count(pushes=1), autograph=False)
    for future in [strategy.schedule(step) for _ in range(60)]:
        future.result(TIMEOUT)
    assert counts_of(state)["pushes"] == 60


def test_the_last_staleness_slot_counts_all_larger_ones(strategy, state):
    @tf.function(autograph=False)
    def step():
        for staleness in (0, 3, 3, MAX_STALENESS, MAX_STALENESS + 1, 2**40, -1):
            state.count(staleness=tf.constant(staleness, tf.int64))

    result(strategy, step)
    histogram = RuleStatistics.of(state).staleness.histogram
    assert {slot: count for slot, count in enumerate(histogram) if count} == {0: 2, 3: 2, MAX_STALENESS: 3}


def test_steps_and_times_are_recorded_by_worker(strategy, state):
    @tf.function(autograph=False)
    def step():
        with state.lock.hold():
            state.advance_clock(strategy.extended.services.worker_index())
        with state.lock.hold():
            state.record_seen(strategy.extended.services.worker_index(), waited=1.5)

    for _ in range(2):
        on_every_worker(strategy, step)
    assert state.clocks.numpy()[:4].tolist() == [2, 2, 2, 0]
    first, last, waited = state.seconds.numpy()[:3].T
    assert np.all(first > 0)
    assert np.all(last > first)
    assert waited.tolist() == [3.0, 3.0, 3.0]
    assert not state.seconds.numpy()[3:].any()


def test_the_slowest_clock_is_that_of_the_other_active_workers(strategy, state):
    @tf.function(autograph=False)
    def slowest():
        with state.lock.hold():
            return [state.slowest_clock(besides=tf.constant(worker, tf.int64)) for worker in range(3)]

    assert result(strategy, slowest) == [NO_CLOCK] * 3

    def with_rows(variable, rows):
        indices = [[number] for number in range(len(rows))]
        variable.assign(tf.tensor_scatter_nd_update(variable, indices, tf.constant(rows, variable.dtype)))

    with_rows(state.clocks, [5, 3, 1])
    with_rows(state.workers.is_active, [True, True, False])
    assert result(strategy, slowest) == [3, 5, 3]
