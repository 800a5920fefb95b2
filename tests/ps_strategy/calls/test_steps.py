"""Tests of many runs of one function with one future, and of `map`."""

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.fusing.fused_calls import FusedCalls

TIMEOUT = 60.0
STEPS = 40


@pytest.mark.parametrize("is_fused", [False, True])
def test_each_output_is_stacked_in_the_order_of_the_runs(strategy, monkeypatch, is_fused, counted):
    fused = FusedCalls(strategy, monkeypatch) if is_fused else None
    with strategy.scope():
        counter = tf.Variable(0)

    @tf.function
    def step(scale):
        # Read once: each use of what `assign_add` returns is a read of its own, and other workers add meanwhile.
        number = tf.identity(counter.assign_add(1))
        row = tf.cast(tf.range(3), tf.float32) * scale
        text = tf.strings.as_string(number)
        return {"number": number, "row": row, "text": (text, tf.fill([2], text)), "nothing": None, "empty": row[:0]}

    future = strategy.schedule(step, args=(2.0,), steps=STEPS)
    result = future.result(TIMEOUT)
    strategy.join(TIMEOUT)
    assert counter.numpy() == counted().finished == future.completed == STEPS
    assert (result["number"].shape, result["number"].dtype) == ((STEPS,), np.int32)
    np.testing.assert_array_equal(result["row"], np.tile([0.0, 2.0, 4.0], [STEPS, 1]))
    assert result["row"].dtype == np.float32
    assert [int(text) for text in result["text"][0]] == list(result["number"])
    assert result["text"][1].shape == (STEPS, 2)
    assert result["nothing"] is None
    assert result["empty"].shape == (STEPS, 0)
    assert not is_fused or max(fused.sizes) > 1


def test_runs_take_the_elements_of_an_iterator_until_it_has_ended_everywhere(strategy):
    def dataset_fn(context):
        start = 100 * context.input_pipeline_id
        return tf.data.Dataset.range(start, start + 10)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

    @tf.function
    def step(iterator):
        return next(iterator)

    workers = len(strategy.cluster.workers)
    future = strategy.schedule(step, args=(iterator,), steps=10 * workers)
    expected = [100 * worker + number for worker in range(workers) for number in range(10)]
    assert sorted(future.result(TIMEOUT)) == expected
    more = strategy.schedule(step, args=(iterator,), steps=5)
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.join(TIMEOUT)
    assert isinstance(more.exception(TIMEOUT), tf.errors.OutOfRangeError)


@pytest.mark.long
def test_only_the_runs_of_a_killed_worker_are_made_again(strategy, shared_cluster, counted):
    with strategy.scope():
        counter, begun = tf.Variable(0), tf.Variable([0, 0])

    @tf.function
    def step():
        worker = coordinator.get_current_worker_index()
        begin = begun.scatter_add(tf.IndexedSlices(1, worker))
        with tf.control_dependencies([begin]), tf.control_dependencies([pause(tf.constant(1e-2, tf.float64))]):
            return worker, tf.identity(counter.assign_add(1))

    ended = []
    stop = strategy.on_event(lambda event: ended.append(event) if event.kind == "closures_finished" else None)
    future = strategy.schedule(step, steps=900)
    wait_until(lambda: future.completed and begun.numpy()[1])
    try:
        shared_cluster.kill("worker", 1)
        workers, numbers = future.result(TIMEOUT)
        strategy.join(TIMEOUT)
    finally:
        shared_cluster.restart("worker", 1)
        wait_until(strategy.cluster.workers[1].healthy)
    after = counted()
    again = after.retried
    assert after.workers[1].losses == 1
    # The library's own closures count as well.
    assert sum(event.count for event in ended) == after.finished
    stop()
    assert future.completed == sum(event.count for event in ended if event.name == "step") == len(numbers) == 900
    assert 900 <= counter.numpy() <= 900 + again
    assert again < 450
    assert 0 in workers


def test_what_cannot_be_stacked_is_refused(strategy):
    with pytest.raises(ValueError, match="Ragged"):
        strategy.schedule(tf.function(lambda: tf.ragged.constant([[1], [2, 3]])), steps=2)
    with strategy.scope():
        counter = tf.Variable(0)
    varying = tf.function(lambda: tf.range(counter.assign_add(1, read_value=True)))
    future = strategy.schedule(varying, steps=3)
    with pytest.raises(ValueError, match="shapes"):
        future.result(TIMEOUT)
    strategy.join(TIMEOUT)
    # Nor is a range of examples one of each run.
    epochs = coordinator.data.Epochs(coordinator.data.client(np.arange(8)), batch_size=2)
    positions = next(iter(epochs.on(strategy)))
    with pytest.raises(ValueError, match="each run"):
        strategy.schedule(tf.function(lambda positions: positions), args=(positions,), steps=2)


def test_map_returns_futures_in_the_order_of_the_arguments(strategy):
    double = tf.function(lambda x, y: 2 * x + tf.reduce_sum(y))
    stacked = strategy.schedule(tf.function(lambda: tf.constant(1)), steps=4)
    futures = strategy.map(double, ((tf.constant(number), stacked) for number in range(20)))
    assert strategy.local_results(futures) == [2 * number + 4 for number in range(20)]
