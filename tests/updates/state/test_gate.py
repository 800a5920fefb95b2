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
        return tf.Variable([False] * 3)


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


def test_a_worker_that_may_begin_does_so_at_once(state, gate, begin, may_end):
    state.version.assign(5)
    [future] = begin(gate, 1)
    # What is changed under the lock in no order is read here without it.
    wait_until(lambda: in_flight(state) == {1: 5} and active(state) == {1})
    assert not waiting(state)
    may_end.assign([True] * 3)
    assert future.result(TIMEOUT) == 5
    # It is idle, so no worker waits for it.
    wait_until(lambda: not in_flight(state) and not active(state))


@pytest.mark.long
def test_a_waiting_worker_gets_the_version_at_which_it_may_begin(strategy, state, is_open, gate, begin, may_end):
    is_open.assign(False)
    futures = begin(gate, 0, 1)
    wait_until(lambda: waiting(state) == {0, 1})
    assert not in_flight(state)
    # The servers are not kept busy: the steps of another worker and the reads of the client are served.
    assert strategy.schedule(tf.function(lambda: state.version.assign_add(3)), worker=2).result(TIMEOUT) == 3
    assert not any(future.done() for future in futures)
    is_open.assign(True)
    wait_until(lambda: in_flight(state) == {0: 3, 1: 3} and not waiting(state))
    may_end.assign([True] * 3)
    for future in futures:
        assert future.result(TIMEOUT) == 3
    assert (state.seconds.numpy()[:2, WAITED] > 0).all()


@pytest.mark.long
def test_the_decision_gets_the_worker_and_its_clock(strategy, state, begin, may_end):
    set_rows(state.clocks, [4, 6, 5])
    gate = Gate(strategy, state, lambda worker, clock: tf.logical_and(worker == 1, clock == 6))
    futures = begin(gate, 1)
    wait_until(lambda: in_flight(state) == {1: 0})
    may_end.assign([True] * 3)
    futures[0].result(TIMEOUT)
    assert state.clocks.numpy()[:3].tolist() == [4, 6, 5]


@pytest.mark.long
def test_waiting_workers_begin_one_by_one_and_see_earlier_ones(strategy, state, begin, may_end):
    def none_in_flight(worker, clock):
        return tf.reduce_all(state.workers.pulled_version.read_value() == NO_STEP)

    gate = Gate(strategy, state, none_in_flight)
    futures = begin(gate, 0, 1, 2)
    left = {0, 1, 2}
    while left:
        # Without the one that has ended and is not removed yet.
        wait_until(lambda: len(left & set(in_flight(state))) == 1)
        [worker] = left & set(in_flight(state))
        assert set(in_flight(state)) == {worker}
        left.remove(worker)
        may_end.assign(tf.tensor_scatter_nd_update(may_end, [[worker]], [True]))
        # When it has ended it is idle, which lets the next one begin.
        futures[worker].result(TIMEOUT)
    wait_until(lambda: not in_flight(state))


def test_a_worker_that_is_dismissed_is_not_waited_for(state, is_open, gate, begin, may_end):
    is_open.assign(False)
    [future] = begin(gate, 2)
    wait_until(lambda: waiting(state) == {2})
    gate.dismiss(0)
    assert waiting(state) == {2}
    is_open.assign(True)
    wait_until(lambda: in_flight(state) == {2: 0})
    gate.dismiss(2)
    assert not in_flight(state)
    assert not active(state)
    may_end.assign([True] * 3)
    future.result(TIMEOUT)


@pytest.mark.long
def test_a_returning_worker_starts_at_the_slowest_clock_of_the_present_ones(state, gate, begin, may_end):
    set_rows(state.clocks, [7, 9, 2])
    futures = begin(gate, 1)
    wait_until(lambda: set(in_flight(state)) == {1})
    assert state.clocks.numpy()[:3].tolist() == [7, 9, 2]
    futures += begin(gate, 0)
    wait_until(lambda: set(in_flight(state)) == {0, 1})
    assert state.clocks.numpy()[:3].tolist() == [9, 9, 2]
    may_end.assign([True] * 3)
    for future in futures:
        future.result(TIMEOUT)


@pytest.mark.long
def test_the_first_worker_to_begin_starts_at_the_greatest_clock_of_all(state, gate, begin, may_end):
    set_rows(state.clocks, [7, 9, 2])
    futures = begin(gate, 2)
    wait_until(lambda: set(in_flight(state)) == {2})
    assert state.clocks.numpy()[:3].tolist() == [7, 9, 9]
    futures += begin(gate, 0, 1)
    wait_until(lambda: set(in_flight(state)) == {0, 1, 2})
    assert state.clocks.numpy()[:3].tolist() == [9, 9, 9]
    may_end.assign([True] * 3)
    for future in futures:
        future.result(TIMEOUT)


@pytest.mark.long
def test_an_abandoned_call_is_not_recorded(strategy, state, gate, begin, may_end):
    may_end.assign([True] * 3)
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


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_a_pause_lasts_the_given_time_once(seconds):
    @tf.function(autograph=False)
    def paused():
        began = tf.timestamp()
        with tf.control_dependencies([pause(tf.constant(seconds, tf.float64) + 0.0 * began)]):
            return tf.timestamp() - began

    lasted = [paused() for _ in range(3)]
    assert min(lasted) >= seconds
    # On a busy machine some last longer.
    assert min(lasted) < 2 * seconds or seconds < 0.2
