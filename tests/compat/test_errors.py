"""Tests of errors as a program for TensorFlow's coordinator sees them. After the meaning of TensorFlow's tests."""

import pytest
import tensorflow as tf

from coordinator.compat import ClosureInputError, ClusterCoordinator
from tests.ps_strategy.gate import Gate


@pytest.fixture
def cluster_coordinator(strategy):
    return ClusterCoordinator(strategy)


@tf.function
def succeed(x):
    return 2 * x


@tf.function
def fail(x):
    tf.debugging.assert_equal(x, 0, "must be zero")
    return x


@tf.function
def take(iterator):
    return next(iterator)


ONE = tf.constant(1)


def schedule(cluster_coordinator, fn, count=1):
    return [cluster_coordinator.schedule(fn, args=(ONE,)) for _ in range(count)]


def test_join_raises_the_error_of_a_function_and_then_is_clean(cluster_coordinator):
    for _ in range(2):
        schedule(cluster_coordinator, succeed, 3)
        [failed] = schedule(cluster_coordinator, fail)
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
            cluster_coordinator.join()
        cluster_coordinator.join()
        assert cluster_coordinator.done()
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
            failed.fetch()


def test_a_later_schedule_raises_the_error(cluster_coordinator):
    schedule(cluster_coordinator, fail)

    def schedule_forever():
        while True:
            schedule(cluster_coordinator, succeed)

    with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
        schedule_forever()
    cluster_coordinator.join()


def test_a_cancelled_function_raises_tensorflows_cancelled_error(strategy, cluster_coordinator):
    gate = Gate(strategy, failure="must not pass")
    gate.occupy(len(strategy.cluster.workers))
    waiting = schedule(cluster_coordinator, succeed, 2)
    gate.open()
    with pytest.raises(tf.errors.InvalidArgumentError, match="must not pass"):
        cluster_coordinator.join()
    # A free worker may have run the last of them before the error was known.
    outcomes = [error_of(value) for value in waiting]
    cancelled = [error for error in outcomes if isinstance(error, tf.errors.CancelledError)]
    assert cancelled
    assert all("Please reschedule the function" in str(error) for error in cancelled)
    assert schedule(cluster_coordinator, succeed)[0].fetch() == 2


def error_of(value):
    try:
        value.fetch()
    except tf.errors.OpError as error:
        return error
    return None


def test_an_input_that_fails_fails_the_functions_that_use_it(cluster_coordinator):
    def make_dataset():
        return tf.data.Dataset.from_tensors(tf.io.read_file("/no/such/file"))

    unreadable = iter(cluster_coordinator.create_per_worker_dataset(make_dataset))
    # If it is not used, it does no harm.
    assert schedule(cluster_coordinator, succeed)[0].fetch() == 2
    value = cluster_coordinator.schedule(take, args=(unreadable,))
    with pytest.raises(ClosureInputError, match="iterator of make_dataset could not be created"):
        cluster_coordinator.join()
    with pytest.raises(ClosureInputError, match="/no/such/file") as caught:
        value.fetch()
    assert isinstance(caught.value.original_exception, tf.errors.NotFoundError)


def test_iterators_can_be_used_after_an_error_and_their_end_is_out_of_range(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(tf.data.Dataset.range(2)))
    schedule(cluster_coordinator, fail)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
        cluster_coordinator.join()
    assert cluster_coordinator.schedule(take, args=(iterator,)).fetch() < 2

    def schedule_forever():
        while True:
            cluster_coordinator.schedule(take, args=(iterator,))

    with pytest.raises(tf.errors.OutOfRangeError):
        schedule_forever()
    cluster_coordinator.join()
