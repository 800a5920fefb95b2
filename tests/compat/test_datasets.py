"""Tests of `create_per_worker_dataset` in all its forms. They follow the meaning of TensorFlow's own tests."""

import weakref

import pytest
import tensorflow as tf

from coordinator.compat import ClosureInputError, ClusterCoordinator, PerWorkerValues
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker


@pytest.fixture
def cluster_coordinator(strategy):
    return ClusterCoordinator(strategy)


@tf.function
def take(iterator):
    return next(iterator)


def first_of(cluster_coordinator, dataset):
    return cluster_coordinator.schedule(take, args=(iter(dataset),)).fetch()


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


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_dataset_gives_the_same_elements(strategy, cluster_coordinator, form):
    dataset = cluster_coordinator.create_per_worker_dataset(FORMS[form](strategy))
    assert first_of(cluster_coordinator, dataset).tolist() == [1, 2, 3, 4]
    assert dataset.element_spec == tf.TensorSpec([None], tf.int64)


def test_an_iterator_is_one_of_tensorflows_per_worker_values(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    assert isinstance(iterator, PerWorkerValues)
    assert isinstance(iterator, tf.distribute.experimental.coordinator.PerWorkerValues)
    assert cluster_coordinator.fetch([iterator, 1]) == [iterator, 1]
    with pytest.raises(RuntimeError, match="inside `step`"):
        next(iterator)


def test_each_iterator_starts_from_the_beginning_and_counts_for_all_workers(strategy, cluster_coordinator):
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def add_next(iterator):
        x = next(iterator)
        total.assign_add(x)
        return x

    dataset = cluster_coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(1, 2))
    assert [cluster_coordinator.schedule(add_next, args=(iter(dataset),)).fetch() for _ in range(2)] == [1, 1]
    assert total.numpy() == 2


def test_a_map_function_is_traced_once(cluster_coordinator):
    traces = []

    def make():
        def add_ten(x):
            traces.append(x)
            return x + 10

        return tf.data.Dataset.range(10).map(add_ten)

    for given in (make, make()):
        traces[:] = [None] * (given is not make)
        assert first_of(cluster_coordinator, cluster_coordinator.create_per_worker_dataset(given)) == 10
        assert len(traces) == 1


def test_workers_shuffle_differently(strategy, cluster_coordinator):
    # With a seed all workers have the same order, as in TensorFlow.
    dataset = cluster_coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(100).shuffle(100).batch(100))
    orders = on_every_worker(strategy, take, iter(dataset))
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)


def test_several_datasets_may_be_arguments_of_one_function(cluster_coordinator):
    small, large = (
        iter(cluster_coordinator.create_per_worker_dataset(lambda first=first: tf.data.Dataset.range(first, first + 9)))
        for first in (0, 5)
    )
    add = tf.function(lambda a, b: next(a) + next(b))
    assert cluster_coordinator.schedule(add, args=(small,), kwargs={"b": large}).fetch() == 5
    assert cluster_coordinator.schedule(add, args=(small, large)).fetch() in (5, 7)


def test_a_dataset_may_be_an_argument_itself(cluster_coordinator):
    dataset = cluster_coordinator.create_per_worker_dataset(make_batches()).build()
    first = tf.function(lambda dataset: next(iter(dataset)))
    assert cluster_coordinator.schedule(first, args=(dataset,)).fetch().tolist() == [1, 2, 3, 4]


def test_an_input_signature_may_name_the_iterators_type(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    for signature in (iterator._type_spec, tf.data.IteratorSpec(iterator.element_spec)):
        take_signed = tf.function(lambda it: tf.reduce_max(next(it)), input_signature=[signature])
        assert cluster_coordinator.schedule(take_signed, args=(iterator,)).fetch() in (4, 8, 10)


def test_iterators_that_are_dropped_are_freed(cluster_coordinator):
    dataset = cluster_coordinator.create_per_worker_dataset(make_batches)
    references = []
    for _ in range(3):
        iterator = iter(dataset)
        references.append(weakref.ref(iterator))
        cluster_coordinator.schedule(take, args=(iterator,))
        cluster_coordinator.join()
    del iterator
    # A worker's thread lets go of its last call shortly after the call has finished.
    wait_until(lambda: not any(reference() for reference in references))


def test_what_is_no_dataset_is_refused_in_words(cluster_coordinator):
    with pytest.raises(ValueError, match="takes a dataset or a function that returns one, got 3"):
        cluster_coordinator.create_per_worker_dataset(3)
    with pytest.raises(TypeError, match="'make_three' must return a"):
        cluster_coordinator.create_per_worker_dataset(make_three)


def make_three():
    return 3


def test_a_dataset_function_must_not_create_variables(cluster_coordinator):
    with pytest.raises(ValueError, match="must not create variables"):
        cluster_coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.from_tensors(tf.Variable(0.0)))


def test_a_dataset_begun_on_the_client_is_an_input_error(cluster_coordinator):
    begun = tf.data.Dataset.range(1, 10)
    dataset = cluster_coordinator.create_per_worker_dataset(tf.function(lambda: begun.shuffle(9)))
    value = cluster_coordinator.schedule(take, args=(iter(dataset),))
    with pytest.raises(ClosureInputError, match="made outside of it, on the client"):
        cluster_coordinator.join()
    with pytest.raises(ClosureInputError):
        value.fetch()


def test_the_end_of_the_data_is_raised_as_out_of_range(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(tf.data.Dataset.range(2)))

    def schedule_forever():
        while True:
            cluster_coordinator.schedule(take, args=(iterator,))

    with pytest.raises(tf.errors.OutOfRangeError):
        schedule_forever()
    cluster_coordinator.join()
