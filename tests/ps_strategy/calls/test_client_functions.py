"""Tests of `schedule`, `join`, `done` and `local_results` in a `tf.function` that the program calls on the client."""

import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls.client_functions import Futures, GraphFuture
from tests.deadline import wait_until
from tests.ps_strategy.failure_programs import waiting_client_functions
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


def test_a_function_that_schedules_may_be_called_by_others_and_in_loops(strategy, counter, add):
    @tf.function
    def epoch(steps):
        for _ in tf.range(steps):
            strategy.schedule(add, args=(1,))
        strategy.join()

    @tf.function
    def train():
        counter.assign(0)
        for _ in tf.range(3):
            epoch(tf.constant(2))
        before = counter.read_value()
        with strategy.scope():
            tf.cond(before > 0, lambda: epoch(tf.constant(4)), lambda: None)
        return before, counter.read_value()

    # Traced by itself first: its parts are not traced again where others call it.
    epoch(tf.constant(1))
    assert [value.numpy() for value in train()] == [6, 10]


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


def test_the_end_of_the_data_is_raised_in_a_loop_over_an_iterator(strategy):
    iterator = iter(strategy.experimental_distribute_datasets_from_function(lambda context: tf.data.Dataset.range(5)))
    step = tf.function(lambda iterator: next(iterator) + 0)

    @tf.function
    def epoch():
        for _ in tf.range(1000):
            strategy.schedule(step, args=(iterator,))

    with pytest.raises(tf.errors.OutOfRangeError, match="has no element left"):
        epoch()


@pytest.fixture
def python_handler():
    """The handler that raises `KeyboardInterrupt`: a process that runs in the background may have none."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("wait", ["join", "local_results"])
@pytest.mark.usefixtures("python_handler")
def test_ctrl_c_ends_a_call_that_waits_and_nothing_else(strategy, wait):
    gate = Gate(strategy)
    [first] = gate.occupy()
    running = strategy.cluster.statistics().running
    after = tf.function(lambda number: number)

    @tf.function
    def train():
        future = strategy.schedule(after, args=(first,))
        if wait == "join":
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


def test_calls_on_several_threads_do_not_hold_each_other_up(strategy, counter, add):
    gate = Gate(strategy)
    [future] = gate.occupy()
    awaited = tf.function(lambda: strategy.local_results(future))
    waiting = [threading.Thread(target=awaited) for _ in range(4)]
    for thread in waiting:
        thread.start()
    # As many threads as TensorFlow has for graphs, and more, wait: others go on.
    train = tf.function(lambda: strategy.local_results(strategy.schedule(add, args=(1,))))
    assert [train().numpy() for _ in range(3)] == [1, 2, 3]
    gate.open()
    for thread in waiting:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_handles_of_arrays_are_the_memory_of_tensors():
    # What the life of a future depends on: TensorFlow uses an aligned array, and keeps the object that was returned.
    futures = Futures()

    def add_future():
        return futures.add("a future")

    handle = tf.function(lambda: tf.numpy_function(add_future, [], tf.int32))()
    gc.collect()
    assert futures[handle] == "a future"
    copy = np.array(handle)
    del handle
    assert count_after_release(futures) == 0
    with pytest.raises(ValueError, match="does not exist any more"):
        futures[copy]


@pytest.mark.long
@pytest.mark.cluster
def test_a_worker_returns_while_calls_wait_with_one_thread_for_graphs(run_program):
    program = run_program(Path(waiting_client_functions.__file__).read_text(), timeout=120)
    assert "ended" in program.stdout
