"""Tests of loops over data that ends: every example is visited, and the loop ends when the last worker has no more."""

import concurrent.futures
from collections import Counter

import keras
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.fusing.fused_calls import TIMEOUT, FusedCalls
from tests.ps_strategy.gate import Gate
from tests.ps_strategy.per_worker.elements import first, total

EXAMPLES = 53
# More than there are workers, and few enough that the loop leaves them the processors.
_AHEAD = 20


@pytest.fixture
def dataset(strategy):
    def sharded(context):
        return tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, context.input_pipeline_id)

    return strategy.experimental_distribute_datasets_from_function(sharded)


def schedule_all(strategy, *iterators, function=first):
    """Schedules until the data has ended everywhere, a few ahead of those that have ended; returns the futures."""
    futures = []
    while True:
        if len(futures) > _AHEAD:
            concurrent.futures.wait([futures[-_AHEAD]], TIMEOUT)
        try:
            futures.append(strategy.schedule(function, args=iterators))
        except tf.errors.OutOfRangeError:
            return futures


def visited(futures):
    """Counts the results of those that have one; the others raise OutOfRangeError."""
    errors = [future.exception(TIMEOUT) for future in futures]
    assert all(error is None or isinstance(error, tf.errors.OutOfRangeError) for error in errors)
    return Counter(int(future.result()) for future, error in zip(futures, errors, strict=True) if error is None)


def test_a_loop_until_the_end_visits_every_example_once_in_each_epoch(strategy, dataset):
    with strategy.scope():
        count, weight = tf.Variable(0), keras.Variable(1.0)
        optimizer, mean = keras.optimizers.SGD(), keras.metrics.Mean()
        optimizer.build([weight])

    @tf.function
    def step(iterator):
        number = next(iterator)
        count.assign_add(1)
        optimizer.apply([tf.constant(0.0)], [weight])
        mean.update_state(1.0)
        return number

    for _ in range(3):
        futures = schedule_all(strategy, iter(dataset), function=step)
        strategy.join(TIMEOUT)
        assert visited(futures) == dict.fromkeys(range(EXAMPLES), 1)
    counted = [count.numpy(), int(optimizer.iterations), *(int(value) for value in mean.variables)]
    assert counted == [3 * EXAMPLES] * 4


def test_join_raises_the_end_of_data_and_says_how_to_write_the_loop(strategy, dataset):
    gate = Gate(strategy)
    gate.occupy(2)
    iterator = iter(dataset)
    futures = [strategy.schedule(first, args=(iterator,)) for _ in range(EXAMPLES + 2)]
    gate.open()
    with pytest.raises(tf.errors.OutOfRangeError, match=r"The iterator of sharded has no element left.*") as raised:
        strategy.join(TIMEOUT)
    strategy.join(TIMEOUT)
    assert "except tf.errors.OutOfRangeError" in str(raised.value)
    assert "End of sequence" in str(raised.value.__cause__)
    assert visited(futures) == dict.fromkeys(range(EXAMPLES), 1)


def test_finite_data_in_fused_calls_is_visited_once(strategy, dataset, monkeypatch):
    @tf.function
    def take_if(iterator, number):
        return next(iterator) if iterator is not None else number

    zero = tf.constant(0, tf.int64)
    fused, iterator = FusedCalls(strategy, monkeypatch), iter(dataset)
    taken = [int(strategy.schedule(take_if, (iterator, zero), worker=worker).result(TIMEOUT)) for worker in range(2)]
    # Steps without an element are fused with each other only.
    none = [(None, tf.constant(number, tf.int64)) for number in range(24)]
    futures = fused.run(take_if, [(iterator, zero)] * (EXAMPLES - 2) + none)
    assert visited(futures[:-24]) + Counter(taken) == dict.fromkeys(range(EXAMPLES), 1)
    assert visited(futures[-24:]) == dict.fromkeys(range(24), 1)
    assert sum(fused.sizes) > EXAMPLES // 2
    assert not any(future.exception(0) for future in futures)
    with pytest.raises(tf.errors.OutOfRangeError):
        schedule_all(strategy, iterator)[0].result(TIMEOUT)
    strategy.join(TIMEOUT)


def test_a_step_of_several_elements_may_end_in_the_middle(strategy, dataset):
    with strategy.scope():
        counts = tf.Variable(tf.zeros([EXAMPLES], tf.int64))

    @tf.function
    def take_ten(iterator):
        for _ in tf.range(10):
            counts.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), next(iterator)))

    schedule_all(strategy, iter(dataset), function=take_ten)
    assert (counts.numpy() == 1).all()


def test_a_step_reads_two_iterators_until_one_has_ended(strategy, dataset):
    pair = tf.function(lambda iterator, other: (next(iterator), next(other)))
    short = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(5)))
    futures = schedule_all(strategy, iter(dataset), short, function=pair)
    pairs = [future.result() for future in futures if future.exception(TIMEOUT) is None]
    assert Counter(int(second) for _, second in pairs) == dict.fromkeys(range(5), 2)


def test_the_end_of_a_functions_own_data_is_its_own_error(strategy, dataset):
    @tf.function
    def overrun(iterator):
        own = iter(tf.data.Dataset.range(0))
        return next(iterator) + next(own)

    iterator = iter(dataset)
    future = strategy.schedule(overrun, args=(iterator,))
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        strategy.join(TIMEOUT)
    assert isinstance(future.exception(0), tf.errors.OutOfRangeError)
    # The element that it took is not read again, and that by which the library recognized the error is lost.
    left = visited(schedule_all(strategy, iterator))
    assert (len(left), set(left.values())) == (EXAMPLES - 2, {1})


def test_functions_that_ask_for_the_end_never_raise_it(strategy, dataset):
    @tf.function
    def rest(iterator):
        result, number = tf.constant(0, tf.int64), iterator.get_next_as_optional()
        while number.has_value():
            result += number.get_value()
            number = iterator.get_next_as_optional()
        return result

    for function in (rest, total):
        assert sum(on_every_worker(strategy, function, iter(dataset))) == sum(range(EXAMPLES))
