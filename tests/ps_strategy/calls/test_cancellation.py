"""What happens to running and waiting functions when one fails or all are cancelled, and when Ctrl-C is pressed."""

import concurrent.futures
import os
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
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


def check_count_after(strategy, counter, count):
    """Checks that new functions run once each, on every worker."""
    for worker in (0, 1, 0, 1, None, None, None):
        strategy.schedule(count, worker=worker)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 7
    counter.assign(0)


def test_what_runs_and_what_waits_is_cancelled_and_the_strategy_is_ready_for_more(strategy, endless, counter, counted):
    count = tf.function(lambda _=None: counter.assign_add(1))
    running = endless.occupy(2)
    waiting = [strategy.schedule(count) for _ in range(20)]
    waiting.append(strategy.schedule(count, args=(running[0],)))
    waiting.append(strategy.schedule(count, worker=1, timeout=TIMEOUT))
    strategy.cancel_all()
    assert all(future.cancelled() for future in (*running, *waiting))
    statistics = counted()
    assert (statistics.waiting, statistics.running, statistics.cancelled) == (0, 0, 24)
    assert counter.numpy() == 0
    check_count_after(strategy, counter, count)
    # An error that `join` has not raised is forgotten.
    endless.occupy()
    failing = Gate(strategy, failure="first error")
    (failed,) = failing.occupy()
    failing.open()
    assert isinstance(failed.exception(TIMEOUT), tf.errors.InvalidArgumentError)
    strategy.cancel_all()
    check_count_after(strategy, counter, count)


def test_after_ctrl_c_everything_can_be_cancelled_and_training_goes_on(strategy, endless, counter, count):
    (running,) = endless.occupy()

    def until_ctrl_c(wait):
        # It may come earlier or later: nothing else ends this wait.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait()

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for wait in (strategy.join, running.result, lambda: strategy.local_results([running])):
            with pytest.raises(KeyboardInterrupt):
                until_ctrl_c(wait)
    finally:
        signal.signal(signal.SIGINT, former)
    assert not running.done()
    strategy.cancel_all()
    assert running.cancelled()
    check_count_after(strategy, counter, count)


def test_fit_predict_and_evaluate_raise_cancelled_error(strategy):
    class Cancel(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            # Again and again: what was scheduled before one cancellation may have ended.
            if batch >= 2:
                strategy.cancel_all()

        on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.zeros((400, 1), np.float32)
    for call, data in ((model.fit, (x, x)), (model.evaluate, (x, x)), (model.predict, (x,))):
        with pytest.raises(concurrent.futures.CancelledError):
            call(*data, batch_size=2, verbose=0, callbacks=[Cancel()])
    strategy.join(TIMEOUT)
