"""Tests of the index of the worker that runs a function, in all places where it can be read."""

import pytest
import tensorflow as tf

import coordinator
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls
from tests.ps_strategy.per_worker.elements import total

WORKERS = 2


def test_shards_by_the_workers_index_are_disjoint_and_complete(strategy):  # row 13
    traces = []

    def shard(context):
        traces.append(context)
        return tf.data.Dataset.range(15).shard(context.num_input_pipelines, coordinator.get_current_worker_index())

    dataset = strategy.experimental_distribute_datasets_from_function(shard)
    assert on_every_worker(strategy, total, iter(dataset)) == [56, 49]
    assert len(traces) == 1


def test_every_function_sees_the_index_of_its_worker_also_by_tensorflows_own_name(strategy, monkeypatch):
    tensorflows = tf.distribute.coordinator.experimental_get_current_worker_index

    def dataset_fn(_):
        dataset = tf.data.Dataset.range(WORKERS).shard(WORKERS, tensorflows())
        return dataset.map(lambda element: 10 * element + coordinator.get_current_worker_index()).repeat()

    @tf.function
    def inner():
        return coordinator.get_current_worker_index()

    @tf.function
    def step(iterator):
        index = coordinator.get_current_worker_index()
        assert (index.dtype, index.shape) == (tf.int64, ())
        in_loop = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            in_loop += inner() * tensorflows()
        tf.debugging.assert_equal(index, tensorflows())
        return next(iterator), index, in_loop

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    expected = [(11 * index, index, 2 * index**2) for index in range(WORKERS)]
    assert on_every_worker(strategy, step, iterator) == expected
    fused = FusedCalls(strategy, monkeypatch)
    assert {future.result() for future in fused.run(step, [(iterator,)] * COUNT)} == set(expected)
    assert STEPS in fused.sizes


def test_the_index_raises_outside_of_scheduled_functions(strategy):
    tensorflows = tf.distribute.coordinator.experimental_get_current_worker_index
    traced = tf.function(tensorflows).get_concrete_function()
    assert on_every_worker(strategy, traced) == list(range(WORKERS))
    for read in (traced, tensorflows):
        with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
            read()
    with strategy.scope(), pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
        coordinator.get_current_worker_index()
    for read in (coordinator.get_current_worker_index, tf.function(coordinator.get_current_worker_index)):
        with pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
            read()
