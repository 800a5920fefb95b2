"""Tests of resources of every kind that a function creates on each worker."""

import pytest
import tensorflow as tf

from coordinator import ClosureInputError
from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 60.0


def new_queue():
    return tf.queue.FIFOQueue(10, [tf.int64], [[]])


def test_each_worker_has_a_queue_of_its_own(strategy, shared_cluster):
    with strategy.scope():
        queue = strategy.create_per_worker_resource(new_queue)

    @tf.function
    def put(value):
        queue.enqueue(value)
        return queue.size()

    assert on_every_worker(strategy, put, tf.constant(3, tf.int64)) == [1, 1]
    assert strategy.schedule(put, (tf.constant(4, tf.int64),), worker=1).result(TIMEOUT) == 2
    assert on_every_worker(strategy, tf.function(queue.dequeue)) == [3, 3]
    assert on_every_worker(strategy, tf.function(queue.size)) == [0, 1]
    assert queue.size().numpy() == 0, "the client has one, too"
    # A worker that was restarted creates its own again.
    shared_cluster.kill("worker", 1)
    shared_cluster.restart("worker", 1)
    assert on_every_worker(strategy, put, tf.constant(3, tf.int64)) == [1, 1]


def test_a_module_of_a_variable_a_table_and_a_generator_is_one_resource(strategy):
    class Counter(tf.Module):
        def __init__(self):
            super().__init__()
            self.count = tf.Variable(0, dtype=tf.int64)
            self.seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=-1)
            self.generator = tf.random.Generator.from_seed(7)

        def __call__(self, key):
            self.count.assign_add(1)
            self.seen.insert(key, self.count)
            return self.count.read_value(), self.seen.size(), self.generator.normal([])

    with strategy.scope():
        counter = strategy.create_per_worker_resource(Counter)
    step = tf.function(counter)
    first = on_every_worker(strategy, step, tf.constant(5, tf.int64))
    assert [(count, size) for count, size, _ in first] == [(1, 1)] * 2
    assert len({float(number) for *_, number in first}) == 1, "they began with the same seed"
    again = strategy.schedule(step, (tf.constant(6, tf.int64),), worker=1).result(TIMEOUT)
    assert again[:2] == (2, 2)
    assert again[2] != first[0][2]
    assert counter.count.numpy() == 0
    assert counter.count.device.startswith("/job:chief")


def test_a_resource_that_cannot_be_created_fails_the_functions_that_use_it(strategy):
    calls = []

    def only_once():
        calls.append(1)
        assert len(calls) == 1, "no second one"
        return new_queue()

    with pytest.raises(TypeError, match="in which there is no resource"):
        strategy.create_per_worker_resource(lambda: 1)
    queue = strategy.create_per_worker_resource(only_once)
    future = strategy.schedule(tf.function(queue.size))
    with pytest.raises(ClosureInputError, match=r"the resource of only_once could not be created .* no second one"):
        strategy.join(TIMEOUT)
    assert isinstance(future.exception(TIMEOUT), ClosureInputError)


def test_resources_of_the_client_but_a_summary_writer_are_refused_by_words(strategy, tmp_path):
    with strategy.scope():
        queue = new_queue()
    iterator = iter(tf.data.Dataset.range(3))
    for fn in (queue.dequeue, lambda: next(iterator)):
        with pytest.raises(ValueError, match=r"resource of the client .* strategy\.create_per_worker_resource"):
            strategy.schedule(tf.function(fn))
    writer = tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def step():
        with writer.as_default():
            tf.summary.scalar("loss", 1.0, step=1)

    strategy.schedule(step).result(TIMEOUT)
    writer.close()
    assert list(tmp_path.glob("*tfevents*"))
