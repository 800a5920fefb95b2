"""Tests that the iterators which this library makes have no thread for autotuning, unless a dataset asks for it."""

import psutil
import pytest
import tensorflow as tf

from coordinator.data.source import without_autotuning
from coordinator.ps_strategy.tensorflow_internals.datasets import options_in_graph
from tests.ps_strategy.every_worker import on_every_worker

ITERATORS = 30


def numbers():
    return tf.data.Dataset.range(100)


def test_the_options_of_a_dataset_decide():
    assert without_autotuning(numbers()).options().autotune.enabled is False
    asked = tf.data.Options()
    asked.autotune.enabled = True
    asked.deterministic = False
    dataset = numbers().with_options(asked).batch(2)
    assert without_autotuning(dataset) is dataset
    other = tf.data.Options()
    other.deterministic = False
    assert without_autotuning(numbers().with_options(other)).options().deterministic is False


def test_elements_are_the_same_with_values_that_would_be_tuned():
    dataset = numbers().map(lambda number: 2 * number, tf.data.AUTOTUNE).batch(8).prefetch(tf.data.AUTOTUNE)
    rows = [row.tolist() for row in without_autotuning(dataset).as_numpy_iterator()]
    assert rows == [row.tolist() for row in dataset.as_numpy_iterator()]


def test_options_are_known_in_a_function_without_a_warning(recwarn):
    @tf.function
    def make():
        asked = tf.data.Options()
        asked.autotune.enabled = True
        found = [options_in_graph(each).autotune.enabled for each in (numbers(), numbers().with_options(asked))]
        assert found == [None, True]
        return numbers()

    make.get_concrete_function()
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["a dataset function", "a ready dataset"])
def test_a_dataset_that_a_scheduled_function_distributes_has_none(strategy, kind):
    known = []

    @tf.function
    def total():
        if kind == "a ready dataset":
            dataset = strategy.experimental_distribute_dataset(numbers())
        else:
            dataset = strategy.experimental_distribute_datasets_from_function(lambda _: numbers())
        known.append(options_in_graph(dataset).autotune.enabled)
        return dataset.reduce(tf.constant(0, tf.int64), lambda before, number: before + number)

    assert strategy.schedule(total).result(60) == 4950
    assert set(known) == {False}


@pytest.mark.parametrize("kind", ["a dataset function", "a ready dataset"])
def test_iterators_have_no_threads_on_workers(strategy, shared_cluster, kind):
    @tf.function
    def read(iterator):
        return next(iterator)

    if kind == "a ready dataset":
        dataset = strategy.experimental_distribute_dataset(numbers())
    else:
        dataset = strategy.experimental_distribute_datasets_from_function(lambda _: numbers())
    iterators = [iter(dataset) for _ in range(ITERATORS)]
    assert on_every_worker(strategy, read, iterators.pop()) == [0] * len(strategy.cluster.workers)
    workers = [psutil.Process(pid) for (job, _), pid in shared_cluster.processes.items() if job == "worker"]
    before = [worker.num_threads() for worker in workers]
    assert all(on_every_worker(strategy, read, iterator)[0] == 0 for iterator in iterators)
    for worker, count in zip(workers, before, strict=True):
        # TensorFlow's own pools may grow, but not by a thread for each.
        assert worker.num_threads() - count < ITERATORS / 2
