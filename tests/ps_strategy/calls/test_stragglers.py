"""Tests of functions that take too long, are for one worker, or take results of others, on real servers."""

import concurrent.futures

import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0


@tf.function
def where():
    return coordinator.get_current_worker_index()


def test_a_function_that_takes_too_long_is_run_on_another_worker_as_well(strategy):
    with strategy.scope():
        started = tf.Variable(0)

    @tf.function
    def step():
        # Never ends in its first attempt.
        first, iterations = started.assign_add(1, read_value=True) == 1, 0
        while first:
            iterations += 1 + pause(tf.constant(1e-2, tf.float64))
        return coordinator.get_current_worker_index()

    assert strategy.schedule(step, timeout=0.1).result(TIMEOUT) in (0, 1)
    assert started.numpy() >= 2
    strategy.join(TIMEOUT)
    # The straggler was cancelled: its worker is free, although the function would have run for ever.
    assert on_every_worker(strategy, where) == [0, 1]


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
    assert strategy.local_results([strategy.schedule(where, worker=index) for index in (1, 0, 1)]) == [1, 0, 1]
    with pytest.raises(ValueError, match="There is no worker 9"):
        strategy.schedule(where, worker=9)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        strategy.schedule(where, timeout=0)
