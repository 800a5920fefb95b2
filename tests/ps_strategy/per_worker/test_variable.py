"""Tests of per-worker variables: `tf.Variable(..., per_worker_variable=True)`."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker

WORKERS = 2
TIMEOUT = 60.0


@pytest.fixture
def counter(strategy):
    with strategy.scope():
        return tf.Variable(0, dtype=tf.int64, per_worker_variable=True)


def test_every_worker_has_its_own_copy_and_read_all_reads_them(strategy, counter):  # row 62
    count = tf.function(lambda: counter.assign_add(1))
    assert counter.read_all() == [0, 0]
    for rounds in (1, 2):
        on_every_worker(strategy, count)
        assert counter.read_all() == [rounds] * WORKERS
    strategy.schedule(count).result(TIMEOUT)
    assert sorted(counter.read_all()) == [2, 3]
    assert has_copies_on_workers(strategy, counter.handle)
    with strategy.scope():
        variables = [tf.Variable(value, per_worker_variable=True) for value in ([1.5, 2.0], ["a"], True)]
    for variable, expected in zip(variables, ([1.5, 2.0], [b"a"], True), strict=True):
        for value in variable.read_all():
            assert (value.dtype, value.shape, value.device) == (variable.dtype, variable.shape, variable.device)
            assert value.numpy().tolist() == expected


def test_a_per_worker_variable_as_an_argument_is_the_workers_copy(strategy, counter):  # row 61
    with strategy.scope():
        shared = tf.Variable(0, dtype=tf.int64)
    traces = []

    @tf.function
    def count(variable, other, *, by):
        traces.append(variable)
        variable.assign_add(by)
        counter.assign_add(1)
        other.assign_add(1)

    for _ in range(20):
        strategy.schedule(count, args=(counter, shared), kwargs={"by": tf.constant(2, tf.int64)})
    strategy.join(TIMEOUT)
    assert sum(counter.read_all()) == 60
    assert (counter.numpy(), shared.numpy()) == (0, 20)
    assert len(traces) == 1


def test_the_workers_copy_is_used_in_nested_functions_and_datasets_too(strategy, counter):
    @tf.function
    def inner(by):
        return counter.assign_add(by)

    @tf.function
    def step():
        for by in tf.range(3, dtype=tf.int64):
            if by > 0:
                inner(by)
        return tf.data.Dataset.range(4).map(inner).reduce(tf.constant(0, tf.int64), lambda _, value: value)

    def counted(_):
        return tf.data.Dataset.range(2).map(lambda x: counter.assign_add(1) * 10 + x)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(counted))
    assert on_every_worker(strategy, tf.function(lambda it: (next(it), next(it))), iterator) == [(10, 21)] * WORKERS
    assert on_every_worker(strategy, step) == [11] * WORKERS
    assert counter.read_all() == [11, 11]
    # Outside of scheduled functions, it is an ordinary variable on the client.
    tf.function(lambda: counter.assign_add(1))()
    assert (counter.numpy(), counter.device) == (1, "/job:chief/replica:0/task:0/device:CPU:0")
    assert counter.read_all() == [11, 11]


def test_an_initial_value_function_is_called_for_each_copy(strategy):
    with strategy.scope():
        noise = tf.Variable(
            lambda: tf.random.uniform([4]), dtype=tf.float32, name="noise", trainable=False, per_worker_variable=True
        )
    values = noise.read_all()
    assert len({tuple(value.numpy()) for value in values}) == WORKERS
    assert all(value.shape == (4,) and value.dtype == np.float32 for value in values)
    assert not noise.trainable


def test_evaluation_over_shards_is_exact_although_all_workers_are_killed(strategy, shared_cluster):  # row 71
    """Each shard returns what it counted in scratch variables of its worker, which are zero when it returns.

    A shard is counted by whichever attempt returned it, so nothing is lost with a worker and nothing counts twice.
    """
    shards, values = 128, np.arange(1024, dtype=np.float32)
    data = tf.constant(values)
    with strategy.scope():
        total = tf.Variable(0.0, per_worker_variable=True)
        count = tf.Variable(0.0, per_worker_variable=True)

    @tf.function
    def evaluate(shard):
        total.assign(0.0)
        count.assign(0.0)
        for value in tf.data.Dataset.from_tensor_slices(data).shard(shards, shard):
            total.assign_add(value)
            count.assign_add(1.0)
        return total.read_value(), count.read_value()

    futures = [strategy.schedule(evaluate, args=(tf.constant(shard, tf.int64),)) for shard in range(shards)]
    for index in range(WORKERS):
        futures[8 + 64 * index].result(TIMEOUT)
        shared_cluster.kill("worker", index)
        shared_cluster.restart("worker", index, wait=False)
    results = [future.result(TIMEOUT) for future in futures]
    assert sum(total for total, _ in results) / sum(count for _, count in results) == values.mean()
    for index in range(WORKERS):
        shared_cluster.wait_ready("worker", index)
    on_every_worker(strategy, evaluate, tf.constant(0, tf.int64))
    assert count.read_all() == [8.0] * WORKERS
