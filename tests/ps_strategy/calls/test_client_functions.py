"""Tests of `schedule`, `join`, `done` and `local_results` in a `tf.function` that the program calls on the client."""

import gc
import os
import signal
import threading

import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls.client_functions import GraphFuture
from coordinator.workers.scheduler import Scheduler
from tests.deadline import wait_until
from tests.ps_strategy.gate import Gate

TIMEOUT = 60.0


def test_a_loop_schedules_and_join_waits_in_the_order_of_the_program(strategy, counter, add, counted):
    seen = []

    @tf.function
    def train(count):
        counter.assign(100)
        for number in tf.range(count):
            if number % 2 == 0:
                strategy.schedule(add, args=(number,))
                strategy.join()
            tf.numpy_function(seen.append, [counter.read_value()], [])
        last = strategy.schedule(add, kwargs={"number": 1})
        strategy.join()
        return counter.read_value(), strategy.local_results({"last": last, "count": count}), strategy.done()

    train.get_concrete_function(tf.constant(0))
    assert counted().finished == 0
    value, results, is_done = train(tf.constant(6))
    assert [int(value) for value in seen] == [100, 100, 102, 102, 106, 106]
    assert (value.numpy(), results["last"].numpy(), results["count"].numpy(), is_done.numpy()) == (107, 107, 6, True)
    assert counted().finished == 4


def test_results_are_tensors_of_the_types_that_the_function_returns(strategy):
    with strategy.scope():
        weight = tf.Variable(2.0)

    @tf.function
    def compute(rows, text):
        with tf.GradientTape() as tape:
            loss = weight**2
        weight.assign_sub(0.25 * tape.gradient(loss, weight))
        half = tf.cast(tf.size(text), tf.bfloat16) / 2
        return {"rows": rows * 2, "text": (tf.strings.upper(text), None), "half": half, "loss": loss}

    nothing = tf.function(lambda: None)

    @tf.function
    def train(rows, text):
        strategy.local_results(strategy.schedule(nothing))
        # It is traced as outside of this function.
        with tf.device("/job:ps/task:0"):
            return strategy.local_results([strategy.schedule(compute, args=(rows, text)), 3])

    result, three = train(tf.ragged.constant([[1, 2], [3]]), tf.constant(["a", "b", "c"]))
    assert result["rows"].to_list() == [[2, 4], [6]]
    assert result["text"][0].numpy().tolist() == [b"A", b"B", b"C"]
    assert result["text"][1] is None
    assert (result["half"].dtype, float(result["half"]), three.numpy()) == (tf.bfloat16, 1.5, 3)
    assert (result["loss"].numpy(), weight.numpy()) == (4.0, 1.0)


def test_futures_are_arguments_and_loop_variables_and_may_leave_the_function(strategy, counter, add):
    outside = strategy.schedule(add, args=(10,))

    @tf.function
    def train(count):
        future = strategy.schedule(add, args=(outside,))
        for _ in tf.range(count):
            future = strategy.schedule(add, args=(future,))
        runs = strategy.local_results(strategy.schedule(add, args=(0,), steps=count))
        return future, strategy.local_results(outside), runs

    future, first, runs = train(tf.constant(2))
    assert isinstance(future, GraphFuture)
    assert strategy.local_results([future]) == [80]
    assert first.numpy() == 10
    assert runs.shape == [2]
    assert train(tf.constant(5))[2].shape == [5]
    assert train.experimental_get_tracing_count() == 1


def count_after_release(futures):
    """Returns how many futures there are, once TensorFlow has given back arrays: when it calls Python next."""
    tf.numpy_function(lambda: False, [], tf.bool)
    return len(futures)


def test_a_future_is_released_when_the_graph_does_not_use_it_any_more(strategy, add):
    futures = strategy.extended.client_functions.futures
    counts = []

    @tf.function
    def train(count):
        future = strategy.schedule(add, args=(0,))
        for _ in tf.range(count):
            future = strategy.schedule(add, args=(0,))
            tf.numpy_function(lambda: counts.append(len(futures)), [], [])
        return future

    future = train(tf.constant(50))
    gc.collect()
    assert strategy.local_results(future) == 0
    del future
    assert count_after_release(futures) == 0
    assert max(counts) <= 20


def test_the_error_of_a_function_is_raised_as_itself_and_the_strategy_goes_on(strategy, counter, add):
    @tf.function
    def check(number):
        tf.debugging.assert_less(number, 3, "too large")

    @tf.function
    def train():
        for number in tf.range(20):
            strategy.schedule(check, args=(number,))
        strategy.join()

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large") as caught:
        train()
    assert any("failed on /job:worker" in note for note in caught.value.__notes__)

    @tf.function
    def awaited(count):
        futures = [strategy.schedule(check, args=(tf.constant(5 * number),)) for number in range(1, count)]
        return strategy.local_results(futures[-1:])

    # Once: as the error of its future, and not again in `join`; or as that of another one, by which it was cancelled.
    for count in (2, 20):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            awaited(count)
        if count == 2:
            strategy.join(TIMEOUT)
    tf.function(lambda: strategy.schedule(add, args=(1,)))()
    strategy.join(TIMEOUT)
    assert counter.numpy() == 1


def test_ctrl_c_ends_a_call_that_waits_and_nothing_else(strategy):
    # A process that runs in the background may have no handler that raises `KeyboardInterrupt`.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = Gate(strategy)
    [first] = gate.occupy()
    running = strategy.cluster.statistics().running
    after = tf.function(lambda number: number)

    @tf.function
    def train():
        future = strategy.schedule(after, args=(first,))
        strategy.join()
        return strategy.local_results(future)

    def interrupt():
        wait_until(lambda: strategy.cluster.statistics().waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    train.get_concrete_function()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        train()
    thread.join()
    assert strategy.cluster.statistics().running == running
    gate.open()
    assert train().numpy() == first.result(TIMEOUT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    assert wakeup == -1
    signal.signal(signal.SIGINT, former)


def test_calls_on_several_threads_do_not_hold_each_other_up(strategy, shared_cluster, counter, add):
    gate = Gate(strategy)
    [future] = gate.occupy()
    awaited = tf.function(lambda: strategy.local_results(future))
    waiting = [threading.Thread(target=awaited) for _ in range(4)]
    for thread in waiting:
        thread.start()
    # As many threads as TensorFlow has for graphs, and more, wait: others go on, and a worker returns.
    train = tf.function(lambda: strategy.local_results(strategy.schedule(add, args=(1,))))
    assert [train().numpy() for _ in range(3)] == [1, 2, 3]
    shared_cluster.restart("worker", 1)
    assert strategy.schedule(add, args=(1,), worker=1).result(TIMEOUT) == 4
    gate.open()
    for thread in waiting:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


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
    assert steps == [None] * 7
