"""Tests that the iterators which this library makes have no thread for autotuning, unless a dataset asks for it."""

import psutil
import tensorflow as tf

from coordinator.data.source import without_autotuning
from tests.ps_strategy.every_worker import on_every_worker

ITERATORS = 30


def numbers(*_):
    return tf.data.Dataset.range(100)


def test_the_options_of_a_dataset_decide():
    assert without_autotuning(numbers()).options().autotune.enabled is False
    asked = tf.data.Options()
    asked.autotune.enabled = True
    dataset = numbers().with_options(asked).batch(2)
    assert without_autotuning(dataset) is dataset
    other = tf.data.Options()
    other.deterministic = False
    assert without_autotuning(numbers().with_options(other)).options().deterministic is False


def test_iterators_have_no_threads_on_workers(strategy, shared_cluster):
    @tf.function
    def read(iterator):
        return next(iterator)

    workers = [psutil.Process(pid) for (job, _), pid in shared_cluster.processes.items() if job == "worker"]
    for dataset in (
        strategy.experimental_distribute_dataset(numbers()),
        strategy.experimental_distribute_datasets_from_function(numbers),
    ):
        iterators = [iter(dataset) for _ in range(ITERATORS)]
        assert on_every_worker(strategy, read, iterators.pop()) == [0] * len(workers)
        before = [worker.num_threads() for worker in workers]
        assert all(on_every_worker(strategy, read, iterator)[0] == 0 for iterator in iterators)
        for worker, count in zip(workers, before, strict=True):
            # TensorFlow's own pools may grow, but not by a thread for each.
            assert worker.num_threads() - count < ITERATORS / 2
