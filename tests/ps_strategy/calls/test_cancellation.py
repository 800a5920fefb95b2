"""What happens to running and waiting functions, and to threads that wait for them, when one function fails."""

import concurrent.futures

import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import scheduler_of
from tests.ps_strategy.gate import Gate

TIMEOUT = 60.0


@pytest.fixture
def endless(strategy):
    """A gate that never opens: only a cancellation ends functions that wait at it."""
    return Gate(strategy)


@pytest.fixture
def failing(strategy):
    """A gate whose functions fail when it opens."""
    return Gate(strategy, failure="first error")


@pytest.mark.parametrize("verb", ["schedule", "join", "done"])
def test_an_error_cancels_what_runs_and_waits_and_the_strategy_stays_usable(
    strategy, endless, failing, count, counter, verb
):  # rows 35, 38, 39, 40
    running = endless.occupy() + failing.occupy()
    waiting = [strategy.schedule(count) for _ in range(4)]
    failing.open()
    concurrent.futures.wait(running[1:], TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match="first error"):
        getattr(strategy, verb)(*([count] if verb == "schedule" else []))
    for future in (running[0], *waiting):
        with pytest.raises(coordinator.ClosureCancelledError, match=r"another closure failed .* Please reschedule"):
            future.result(timeout=0)
        assert isinstance(future.exception(timeout=0), concurrent.futures.CancelledError)
    assert strategy.local_results(waiting) == [None] * 4
    assert counter.numpy() == 0
    for _ in range(6):
        strategy.schedule(count)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 6


def test_iterators_survive_an_error(strategy, endless, failing):  # row 36
    take = tf.function(lambda iterator: next(iterator) + 0)
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(100)))
    endless.occupy()
    assert strategy.schedule(take, args=(iterator,)).result(TIMEOUT) == 0
    failing.occupy()
    failing.open()
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join(TIMEOUT)
    after = strategy.local_results([strategy.schedule(take, args=(iterator,)) for _ in range(9)])
    # Each worker's iterator continues where it was, and one of the two has returned its first element already.
    assert after.count(0) <= 1
    assert None not in after


def test_an_error_is_raised_by_a_schedule_that_waits_for_room(strategy, endless, failing, count, monkeypatch):  # row 37
    monkeypatch.setattr(scheduler_of(strategy).queue, "capacity", 3)
    futures = endless.occupy() + failing.occupy() + [strategy.schedule(count) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        blocked = thread.submit(strategy.schedule, count)
        assert not concurrent.futures.wait([blocked], timeout=0.1).done
        failing.open()
        assert isinstance(blocked.exception(TIMEOUT), tf.errors.InvalidArgumentError)
    assert all(future.done() for future in futures)
    assert strategy.schedule(count).result(TIMEOUT) == 1


def test_changes_of_a_cancelled_function_remain_and_its_iterator_goes_on(strategy, counter):
    @tf.function
    def take_and_hang(iterator):
        taken, iterations = counter.assign_add(1 + tf.cast(next(iterator), tf.int32), read_value=True), 0
        while taken > 0:
            iterations += 1 + pause(tf.constant(1e-2, tf.float64))
        return iterations

    take = tf.function(lambda iterator: next(iterator) + 0)
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(100)))
    hanging = strategy.schedule(take_and_hang, (iterator,), worker=1)
    wait_until(counter.numpy)
    assert hanging.cancel()
    assert strategy.schedule(take, (iterator,), worker=1).result(TIMEOUT) == 1
    assert counter.numpy() == 1


def test_a_future_can_be_cancelled_while_it_waits_and_while_it_runs(strategy, count, counter):
    gate = Gate(strategy)
    running = gate.occupy(2)
    waiting = [strategy.schedule(count) for _ in range(3)]
    assert waiting[1].cancel()
    assert running[0].cancel()
    # Its worker is free, and the other one goes on.
    assert strategy.local_results(waiting[2]) == 2
    assert not running[1].done()
    gate.open()
    strategy.join(TIMEOUT)
    assert running[1].exception(timeout=0) is None
    assert not waiting[0].cancel()
    for cancelled in (waiting[1], running[0]):
        assert cancelled.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            cancelled.result()
    assert strategy.local_results(waiting) == [1, None, 2]
