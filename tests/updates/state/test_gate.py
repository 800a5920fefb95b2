"""Tests of the gate: workers wait until the decision lets them begin, and do not wait for idle workers."""

import pytest
import tensorflow as tf

from coordinator.updates.rule_state import NO_STEP, WAITED, Gate, RuleState, pause
from tests.deadline import wait_until

TIMEOUT = 120.0


@pytest.fixture
def state(strategy):
    with strategy.scope():
        return RuleState()


@pytest.fixture
def is_open(strategy, state):
    with strategy.scope(), strategy.extended.colocate_vars_with(state.version):
        return tf.Variable(True)


@pytest.fixture
def gate(strategy, state, is_open):
    return Gate(strategy, state, lambda worker, clock: is_open.read_value())


@pytest.fixture
def may_end(strategy):
    """Which workers may end their steps; an idle worker is no longer active."""
    with strategy.scope():
        return tf.Variable([False] * 2)


@pytest.fixture
def begin(strategy, may_end):
    """Returns a function that schedules steps that wait at a gate, and then until they may end."""

    def schedule(gate, *workers):
        @tf.function
        def step():
            version = gate.wait_open()
            with tf.control_dependencies([version]):
                polls = tf.constant(0)
            while not may_end[strategy.extended.services.worker_index()]:
                with tf.control_dependencies([pause(tf.constant(0.01, tf.float64))]):
                    polls += 1
            return version

        return [strategy.schedule(step, worker=worker) for worker in workers]

    return schedule


def in_flight(state):
    """Returns the pulled versions of the steps in flight, by worker."""
    versions = state.workers.pulled_version.numpy()
    return {int(worker): int(versions[worker]) for worker in (versions != NO_STEP).nonzero()[0]}


def waiting(state):
    return set(state.workers.is_waiting.numpy().nonzero()[0].tolist())


def active(state):
    return set(state.workers.is_active.numpy().nonzero()[0].tolist())


def set_rows(variable, rows):
    indices = [[number] for number in range(len(rows))]
    variable.assign(tf.tensor_scatter_nd_update(variable, indices, tf.constant(rows, variable.dtype)))


def test_workers_wait_until_the_decision_lets_them_begin(state, is_open, gate, begin, may_end):
    is_open.assign(False)
    futures = begin(gate, 0, 1)
    wait_until(lambda: waiting(state) == active(state) == {0, 1})
    assert not in_flight(state)
    # The servers are not kept busy.
    state.version.assign_add(3)
    assert not any(future.done() for future in futures)
    is_open.assign(True)
    wait_until(lambda: in_flight(state) == {0: 3, 1: 3} and not waiting(state))
    may_end.assign([True] * 2)
    assert [future.result(TIMEOUT) for future in futures] == [3, 3], "the version at which they began"
    # They are idle, so no worker waits for them. Before that they may prepare fused calls.
    wait_until(lambda: not in_flight(state) and not active(state))
    assert (state.seconds.numpy()[:2, WAITED] > 0).all()


def test_a_worker_that_is_dismissed_is_not_waited_for(state, is_open, gate, begin, may_end):
    is_open.assign(False)
    [future] = begin(gate, 1)
    wait_until(lambda: waiting(state) == {1})
    gate.dismiss(0)
    assert waiting(state) == {1}
    is_open.assign(True)
    wait_until(lambda: in_flight(state) == {1: 0})
    gate.dismiss(1)
    assert not in_flight(state)
    assert not active(state)
    may_end.assign([True] * 2)
    future.result(TIMEOUT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "order", "during", "after"),
    [([7, 9, 2], (1, 0), [7, 9, 2], [9, 9, 2]), ([7, 9, 12], (0, 1), [12, 9, 12], [12, 12, 12])],
)
def test_the_first_worker_joins_at_the_greatest_clock_others_at_the_slowest(
    state, gate, begin, may_end, before, order, during, after
):
    set_rows(state.clocks, before)
    futures = begin(gate, order[0])
    wait_until(lambda: set(in_flight(state)) == {order[0]})
    assert state.clocks.numpy()[:3].tolist() == during
    futures += begin(gate, order[1])
    wait_until(lambda: set(in_flight(state)) == {0, 1})
    assert state.clocks.numpy()[:3].tolist() == after
    may_end.assign([True] * 2)
    for future in futures:
        future.result(TIMEOUT)


@pytest.mark.long
def test_an_abandoned_call_is_not_recorded(strategy, state, gate, begin, may_end):
    may_end.assign([True] * 2)
    fences = tf.fill(state.workers.fence.shape, tf.constant(2**40, tf.int64))
    state.workers.fence.assign(fences)
    [future] = begin(gate, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="its worker has a newer one"):
        future.result(TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match="its worker has a newer one"):
        strategy.join(TIMEOUT)
    state.workers.fence.assign(tf.zeros_like(fences))
    [future] = begin(gate, 0)
    future.result(TIMEOUT)
