"""Tests of cancelling everything that is scheduled, and of Ctrl-C while the program waits for it."""

import concurrent.futures
import os
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.gate import Gate

TIMEOUT = 60.0


@pytest.fixture
def endless(strategy):
    """A gate that never opens: only a cancellation ends functions that wait at it."""
    return Gate(strategy)


def check_count_after(strategy, counter, count):
    """Checks that new functions run once each, on every worker."""
    workers = [worker.index for worker in strategy.cluster.workers]
    for worker in [*workers, *workers, None, None, None]:
        strategy.schedule(count, worker=worker)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 2 * len(workers) + 3
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
            if batch == 2:
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
