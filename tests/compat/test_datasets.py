"""Tests of `create_per_worker_dataset` in all its forms. They follow the meaning of TensorFlow's own tests."""

import pytest
import tensorflow as tf

from coordinator.compat import ClusterCoordinator, PerWorkerValues


@pytest.fixture
def cluster_coordinator(strategy):
    return ClusterCoordinator(strategy)


@tf.function
def take(iterator):
    return next(iterator)


def make_batches(_=None):
    return tf.data.Dataset.range(1, 11).batch(4)


@tf.function
def traced_batches():
    return make_batches()


FORMS = {
    "function": lambda strategy: make_batches,
    "tf.function": lambda strategy: traced_batches,
    "concrete function": lambda strategy: traced_batches.get_concrete_function(),
    "dataset": lambda strategy: make_batches(),
    "distributing function": lambda strategy: lambda: strategy.distribute_datasets_from_function(make_batches),
    "function that distributes a dataset": lambda strategy: (
        lambda: strategy.experimental_distribute_dataset(make_batches())
    ),
    "distributed from function": lambda strategy: strategy.distribute_datasets_from_function(make_batches),
    "distributed dataset": lambda strategy: strategy.experimental_distribute_dataset(make_batches()),
}


def test_every_form_of_a_dataset_gives_the_same_elements(strategy, cluster_coordinator):
    for form, make in FORMS.items():
        dataset = cluster_coordinator.create_per_worker_dataset(make(strategy))
        # Each iterator starts from the beginning.
        for _ in range(2):
            value = cluster_coordinator.schedule(take, args=(iter(dataset),))
            assert value.fetch().tolist() == [1, 2, 3, 4], form
        assert dataset.element_spec == tf.TensorSpec([None], tf.int64), form


def test_an_iterator_is_one_of_tensorflows_per_worker_values(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    assert isinstance(iterator, PerWorkerValues)
    assert isinstance(iterator, tf.distribute.experimental.coordinator.PerWorkerValues)
    assert cluster_coordinator.fetch([iterator, 1]) == [iterator, 1]
    with pytest.raises(RuntimeError, match="inside `step`"):
        next(iterator)


def test_a_dataset_may_be_an_argument_itself(cluster_coordinator):
    dataset = cluster_coordinator.create_per_worker_dataset(make_batches()).build()
    first = tf.function(lambda dataset: next(iter(dataset)))
    assert cluster_coordinator.schedule(first, args=(dataset,)).fetch().tolist() == [1, 2, 3, 4]


def test_an_input_signature_may_name_the_iterators_type(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    for signature in (iterator._type_spec, tf.data.IteratorSpec(iterator.element_spec)):
        take_signed = tf.function(lambda it: tf.reduce_max(next(it)), input_signature=[signature])
        assert cluster_coordinator.schedule(take_signed, args=(iterator,)).fetch() in (4, 8, 10)


def test_what_is_no_dataset_is_refused_in_words(cluster_coordinator):
    with pytest.raises(ValueError, match="takes a dataset or a function that returns one, got 3"):
        cluster_coordinator.create_per_worker_dataset(3)
    with pytest.raises(TypeError, match="'make_three' must return a"):
        cluster_coordinator.create_per_worker_dataset(make_three)


def make_three():
    return 3
