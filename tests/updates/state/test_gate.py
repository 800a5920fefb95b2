"""Workers wait at the gate until the decision lets them pass, and for nobody who is not there."""

import pytest
import tensorflow as tf

from coordinator.updates.state.gate import Gate, pause
from coordinator.updates.state.rule_state import NOT_UNDER_WAY, WAITED, Ledger
from tests.deadline import wait_until

TIMEOUT = 120.0


@pytest.fixture
def ledger(strategy):
    with strategy.scope():
        return Ledger()


@pytest.fixture
def is_open(strategy, ledger):
    with strategy.scope(), strategy.extended.colocate_vars_with(ledger.version):
        return tf.Variable(True)


@pytest.fixture
def gate(strategy, ledger, is_open):
    return Gate(strategy, ledger, lambda worker, clock: is_open.read_value())


@pytest.fixture
def may_end(strategy):
    """Which workers may end what they have begun; one that has nothing to do is not active any more."""
    with strategy.scope():
        return tf.Variable([False] * 3)


@pytest.fixture
def begin(strategy, may_end):
    """Schedules steps that wait at a gate, and then until they may end."""

    def schedule(gate, *workers):
        @tf.function
        def step():
            version, waited = gate.wait_open()
            with tf.control_dependencies([version]):
                looks = tf.constant(0)
            while not may_end[strategy.worker_index()]:
                with tf.control_dependencies([pause(tf.constant(0.001, tf.float64))]):
                    looks += 1
            return version, waited

        return [strategy.schedule(step, worker=worker) for worker in workers]

    return schedule


def under_way(ledger):
    """The versions that workers have under way, by worker."""
    versions = ledger.present.pulled_version.numpy()
    return {int(worker): int(versions[worker]) for worker in (versions != NOT_UNDER_WAY).nonzero()[0]}


def waiting(ledger):
    return set(ledger.present.is_waiting.numpy().nonzero()[0].tolist())


def set_rows(variable, rows):
    indices = [[number] for number in range(len(rows))]
    variable.assign(tf.tensor_scatter_nd_update(variable, indices, tf.constant(rows, variable.dtype)))


def test_who_may_begin_does_at_once(ledger, gate, begin, may_end):
    ledger.version.assign(5)
    [future] = begin(gate, 1)
    wait_until(lambda: under_way(ledger) == {1: 5})
    assert ledger.present.is_active.numpy()[:3].tolist() == [False, True, False]
    assert not waiting(ledger)
    may_end.assign([True] * 3)
    version, waited = future.result(TIMEOUT)
    assert version == 5
    assert waited >= 0
    # It has nothing more to do, so nobody is to wait for it.
    wait_until(lambda: not under_way(ledger))
    assert not ledger.present.is_active.numpy().any()


def test_who_may_not_waits_until_it_may_and_gets_the_version_of_then(strategy, ledger, is_open, gate, begin, may_end):
    is_open.assign(False)
    futures = begin(gate, 0, 1)
    wait_until(lambda: waiting(ledger) == {0, 1})
    assert not under_way(ledger)
    # The servers are not kept busy: another worker's step gets through, and so does the client.
    assert strategy.schedule(tf.function(lambda: ledger.version.assign_add(3)), worker=2).result(TIMEOUT) == 3
    assert not any(future.done() for future in futures)
    is_open.assign(True)
    wait_until(lambda: under_way(ledger) == {0: 3, 1: 3})
    assert not waiting(ledger)
    assert (ledger.seconds.numpy()[:2, WAITED] > 0).all()
    may_end.assign([True] * 3)
    for future in futures:
        version, waited = future.result(TIMEOUT)
        assert version == 3
        assert waited > 0


def test_the_decision_gets_the_worker_and_its_clock(strategy, ledger, begin, may_end):
    set_rows(ledger.clocks, [4, 5, 6])
    gate = Gate(strategy, ledger, lambda worker, clock: tf.logical_and(worker == 1, clock == 5))
    futures = begin(gate, 1)
    wait_until(lambda: under_way(ledger) == {1: 0})
    may_end.assign([True] * 3)
    futures[0].result(TIMEOUT)
    assert ledger.clocks.numpy()[:3].tolist() == [4, 5, 6]


def test_one_by_one_each_sees_what_the_one_before_it_has_noted(strategy, ledger, begin, may_end):
    def nobody_is_under_way(worker, clock):
        return tf.reduce_all(ledger.present.pulled_version.read_value() == NOT_UNDER_WAY)

    futures = begin(Gate(strategy, ledger, nobody_is_under_way), 0, 1, 2)
    left = {0, 1, 2}
    while left:
        # Not the one that has ended and was not dismissed yet.
        wait_until(lambda: len(left & set(under_way(ledger))) == 1)
        [worker] = left & set(under_way(ledger))
        assert set(under_way(ledger)) == {worker}
        left.remove(worker)
        may_end.assign(tf.tensor_scatter_nd_update(may_end, [[worker]], [True]))
        # When it has ended it has nothing more to do, which lets the next one begin.
        futures[worker].result(TIMEOUT)
    wait_until(lambda: not under_way(ledger))


def test_a_worker_that_is_dismissed_is_not_waited_for(ledger, is_open, gate, begin, may_end):
    is_open.assign(False)
    [future] = begin(gate, 2)
    wait_until(lambda: waiting(ledger) == {2})
    gate.dismiss(0)
    assert waiting(ledger) == {2}
    is_open.assign(True)
    wait_until(lambda: under_way(ledger) == {2: 0})
    gate.dismiss(2)
    assert not under_way(ledger)
    assert not ledger.present.is_active.numpy().any()
    may_end.assign([True] * 3)
    future.result(TIMEOUT)


def test_a_worker_that_comes_back_comes_in_at_the_slowest_clock_of_those_that_are_there(ledger, gate, begin, may_end):
    set_rows(ledger.clocks, [7, 9, 2])
    futures = begin(gate, 1)
    wait_until(lambda: set(under_way(ledger)) == {1})
    assert ledger.clocks.numpy()[:3].tolist() == [7, 9, 2]
    futures += begin(gate, 0)
    wait_until(lambda: set(under_way(ledger)) == {0, 1})
    assert ledger.clocks.numpy()[:3].tolist() == [9, 9, 2]
    may_end.assign([True] * 3)
    for future in futures:
        future.result(TIMEOUT)


def test_a_call_that_was_given_up_counts_no_more(strategy, ledger, gate, begin, may_end):
    may_end.assign([True] * 3)
    fences = tf.fill(ledger.present.fence.shape, tf.constant(2**40, tf.int64))
    ledger.present.fence.assign(fences)
    [future] = begin(gate, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="its worker has a newer one"):
        future.result(TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match="its worker has a newer one"):
        strategy.join(TIMEOUT)
    ledger.present.fence.assign(tf.zeros_like(fences))
    [future] = begin(gate, 0)
    future.result(TIMEOUT)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_a_pause_lasts_as_long_as_it_is_told_and_is_made_once(seconds):
    @tf.function(autograph=False)
    def paused():
        began = tf.timestamp()
        with tf.control_dependencies([pause(tf.constant(seconds, tf.float64) + 0.0 * began)]):
            return tf.timestamp() - began

    lasted = [paused() for _ in range(3)]
    assert min(lasted) >= seconds
    # On a busy machine some last longer.
    assert min(lasted) < 2 * seconds or seconds < 0.2
