"""Tests of loops in functions on the client that schedule the same call each time, which are one call of many runs."""

import pytest
import tensorflow as tf

from coordinator.workers.scheduler import Scheduler


@pytest.fixture
def steps(monkeypatch):
    """The numbers of steps with which functions were scheduled."""
    found, schedule = [], Scheduler.schedule

    def note(scheduler, *args, steps=None, **settings):
        found.append(steps)
        return schedule(scheduler, *args, steps=steps, **settings)

    monkeypatch.setattr(Scheduler, "schedule", note)
    return found


def test_a_loop_that_schedules_the_same_call_each_time_is_one_call_of_many_runs(strategy, counter, add, steps, counted):
    @tf.function
    def train(epochs, count, amount):
        amount = 2 * amount
        for _ in tf.range(epochs):
            for _ in tf.range(count):
                strategy.schedule(add, args=(amount,))
            strategy.join()
        if count > 20:
            for _ in tf.range(1, count):
                strategy.schedule(add, kwargs={"number": 1}, worker=0)
            strategy.join()
        return counter.read_value()

    one = tf.constant(1)
    assert train(tf.constant(2), tf.constant(30), one).numpy() == 149
    assert train(tf.constant(2), tf.constant(0), one).numpy() == 149
    assert train(tf.constant(1), tf.constant(1), one).numpy() == 151
    assert steps[-4:] == [30, 30, 29, 1]
    assert counted().finished == 90
    assert counted().workers[0].finished >= 29


def test_a_loop_that_does_anything_else_schedules_in_each_iteration(strategy, counter, add, steps):
    # Its results cannot be stacked.
    ragged = tf.function(lambda: tf.ragged.constant([[1], [2, 3]]))

    @tf.function
    def train(count):
        last = strategy.schedule(add, args=(1,))
        for number in tf.range(count):
            strategy.schedule(add, args=(number,))
        for _ in tf.range(count):
            last = strategy.schedule(add, args=(1,))
        for _ in tf.range(count):
            strategy.schedule(add, args=(counter + 1,))
            strategy.join()
        for _ in tf.range(count):
            strategy.schedule(ragged)
        strategy.join()
        return strategy.local_results(last)

    train(tf.constant(2))
    assert steps == [None] * 9


def test_a_loop_schedules_each_call_by_itself_if_others_are_to_go_on_after_an_error(strategy, add, steps, monkeypatch):
    monkeypatch.setattr(Scheduler, "stops_on_error", False)

    def train():
        for _ in tf.range(3):
            strategy.schedule(add, args=(1,))
        strategy.join()

    tf.function(train)()
    assert steps == [None] * 3
    # In a function that runs on a worker, a loop cannot schedule.
    with pytest.raises(RuntimeError, match="Functions are scheduled and awaited on the client"):
        strategy.schedule(tf.function(train))
