"""Tests of functions that take too long, or are cancelled while they run, on real servers."""

import concurrent.futures

import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0


@tf.function
def where():
    return coordinator.get_current_worker_index()


@pytest.fixture
def slow_on(strategy):
    """A function that never ends on one worker, and returns the index of its worker at once on the others."""
    with strategy.scope():
        slow_worker = tf.Variable(-1, dtype=tf.int64)
        started = tf.Variable(0)

    @tf.function
    def step():
        index = coordinator.get_current_worker_index()
        started.assign_add(1)
        iterations = 0
        while tf.cast(index, tf.int64) == slow_worker:
            iterations += 1 + pause(tf.constant(1e-2, tf.float64))
        return index

    return step, slow_worker, started


def test_a_function_that_takes_too_long_is_run_on_another_worker_as_well(strategy, slow_on):
    step, slow_worker, started = slow_on
    on_every_worker(strategy, where)
    finished = strategy.cluster.statistics().finished
    slow_worker.assign(1)
    # Repeated until worker 1 is the first to take it.
    while started.numpy() < 20:
        before = int(started.numpy())
        future = strategy.schedule(step, timeout=0.5)
        assert future.result(TIMEOUT) != 1
        if started.numpy() > before + 1:
            break
    else:
        slow_worker.assign(-1)
        pytest.fail("Worker 1 never took a function.")
    strategy.join(TIMEOUT)
    # The straggler was cancelled: its worker is free, although the function would have run for ever.
    assert [int(index) for index in on_every_worker(strategy, where)] == [0, 1, 2]
    assert strategy.cluster.statistics().finished > finished
    slow_worker.assign(-1)


def test_cancelling_a_running_function_frees_its_worker(strategy):
    gate = Gate(strategy)
    held = gate.occupy(3)
    assert all(future.running() for future in held)
    assert held[0].cancel()
    assert held[0].cancelled()
    assert int(strategy.schedule(where).result(TIMEOUT)) in {0, 1, 2}
    assert not any(future.done() for future in held[1:])
    gate.open()
    strategy.join(TIMEOUT)
    assert all(future.exception(timeout=0) is None for future in held[1:])


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.long)])
def test_cancelling_one_of_many_functions_does_not_affect_the_others(strategy, times):
    for _ in range(times):
        gate = Gate(strategy)
        held = gate.occupy(3)
        assert held[1].cancel()
        wait_until(lambda: strategy.cluster.statistics().running == 2)
        gate.open()
        strategy.join(TIMEOUT)
        assert [future.cancelled() for future in held] == [False, True, False]


# Results as arguments


@pytest.fixture
def functions(strategy):
    @tf.function
    def make(n):
        return {"range": tf.range(n), "ragged": tf.ragged.constant([[1], [2, 3]]), "nothing": None}

    @tf.function
    def total(made, factor):
        return factor * (tf.reduce_sum(made["range"]) + tf.reduce_sum(made["ragged"]))

    return make, total


def test_a_future_may_be_an_argument_also_inside_of_structures(strategy, functions):  # row 7
    make, total = functions
    gate = Gate(strategy)
    [held] = gate.occupy()
    made = strategy.schedule(make, args=(4,))
    doubled = strategy.schedule(total, args=(made, 2))
    nested = strategy.schedule(total, args=({"range": doubled, "ragged": doubled},), kwargs={"factor": held})
    traces = total.experimental_get_tracing_count()
    assert not nested.done()
    gate.open()
    strategy.join(TIMEOUT)
    assert int(doubled.result()) == 24
    assert int(nested.result()) == int(held.result()) * (24 + 24)
    for _ in range(3):
        again = strategy.schedule(total, args=(strategy.schedule(make, args=(4,)), 2))
        assert int(again.result(TIMEOUT)) == 24
    assert total.experimental_get_tracing_count() == traces


def test_a_foreign_future_is_refused(strategy, functions):  # row 7
    make, _ = functions
    for foreign in (coordinator.Future("step", 1, lambda: False), concurrent.futures.Future()):
        with pytest.raises(ValueError, match="not a future of this strategy"):
            strategy.schedule(make, args=(foreign,))


def test_a_function_for_one_worker_runs_there(strategy):
    futures = [strategy.schedule(where, worker=index) for index in (2, 0, 1, 2)]
    strategy.join(TIMEOUT)
    assert [int(future.result()) for future in futures] == [2, 0, 1, 2]
    with pytest.raises(ValueError, match="There is no worker 9"):
        strategy.schedule(where, worker=9)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        strategy.schedule(where, timeout=0)
