"""The index of the worker that runs a function, in all the places where one may ask for it."""

import pytest
import tensorflow as tf

import coordinator
from tests.ps_strategy.every_worker import on_every_worker

WORKERS = 3


@tf.function
def total(iterator):
    result = tf.constant(0, tf.int64)
    for element in iterator:
        result += element
    return result


def test_shards_by_the_workers_index_are_disjoint_and_complete(strategy):  # row 13
    traces = []

    def shard(context):
        traces.append(context)
        return tf.data.Dataset.range(15).shard(context.num_input_pipelines, coordinator.get_current_worker_index())

    dataset = strategy.experimental_distribute_datasets_from_function(shard)
    assert on_every_worker(strategy, total, iter(dataset)) == [30, 35, 40]
    assert len(traces) == 1


def test_a_map_function_in_a_dataset_knows_its_worker(strategy):
    def indices(_):
        return tf.data.Dataset.range(2).map(lambda _: coordinator.get_current_worker_index())

    dataset = strategy.experimental_distribute_datasets_from_function(indices)
    assert on_every_worker(strategy, total, iter(dataset)) == [0, 2, 4]


def test_a_scheduled_function_knows_its_worker_however_deep_it_asks(strategy):
    @tf.function
    def inner():
        return coordinator.get_current_worker_index()

    @tf.function
    def step():
        in_loop = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            for _ in tf.range(2):
                in_loop += inner()
        return coordinator.get_current_worker_index(), inner(), in_loop

    assert on_every_worker(strategy, step) == [(index, index, 4 * index) for index in range(WORKERS)]


def test_the_index_is_an_int64_scalar(strategy):
    @tf.function
    def step():
        index = coordinator.get_current_worker_index()
        assert index.dtype == tf.int64
        assert index.shape == ()
        return index

    assert strategy.schedule(step).result(60) in range(WORKERS)


def test_it_is_not_known_outside_of_scheduled_functions(strategy):
    with pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
        coordinator.get_current_worker_index()
    with strategy.scope(), pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
        coordinator.get_current_worker_index()
    with pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
        tf.function(coordinator.get_current_worker_index)()
