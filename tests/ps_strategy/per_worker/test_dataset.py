"""Per-worker datasets and iterators as arguments of scheduled functions, and their deletion."""

import gc
import weakref

import psutil
import pytest
import tensorflow as tf

from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.per_worker.elements import first, total

WORKERS = 3
TIMEOUT = 60.0


@pytest.fixture
def numbers(strategy):
    """0 to 9 on each worker."""
    return strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(10))


@pytest.fixture
def tens(strategy):
    """0 to 90 on each worker."""
    return strategy.experimental_distribute_dataset(tf.data.Dataset.range(0, 100, 10))


def test_several_iterators_are_arguments_of_one_function(strategy, numbers, tens):  # row 52
    @tf.function
    def add(left, right):
        return next(left) + next(right)

    left, right = iter(numbers), iter(tens)
    assert on_every_worker(strategy, add, left, right) == [0, 0, 0]
    assert on_every_worker(strategy, add, left, right) == [11, 11, 11]
    later = iter(numbers)
    assert on_every_worker(strategy, add, later, right) == [20, 20, 20]
    assert on_every_worker(strategy, add, left, later) == [3, 3, 3]
    assert on_every_worker(strategy, add, right, left) == [33, 33, 33]


def test_iterators_may_be_keyword_arguments_and_inside_of_structures(strategy, numbers, tens):  # row 52
    @tf.function
    def add(features, *, label):
        return next(features["left"]) + next(features["others"][0]) + next(label)

    features = {"left": iter(numbers), "others": [iter(tens)]}
    future = strategy.schedule(add, args=(features,), kwargs={"label": iter(numbers)})
    assert future.result(TIMEOUT) == 0


def test_a_dataset_may_be_an_argument_itself(strategy, numbers):  # row 60
    iterators = []

    @tf.function
    def total_of_both(dataset):
        iterators.append(iter(dataset))
        return total(dataset) + next(iterators[-1])

    assert on_every_worker(strategy, total_of_both, numbers) == [45, 45, 45]
    assert on_every_worker(strategy, total_of_both, numbers) == [45, 45, 45]
    assert len(iterators) == 1


def test_the_function_sees_the_type_of_a_dataset_and_of_an_iterator(strategy, numbers):  # rows 58, 60
    element = tf.TensorSpec([], tf.int64)
    seen = []

    @tf.function
    def inspect_types(dataset, iterator):
        seen.append((tf.data.DatasetSpec.from_value(dataset), iterator.element_spec))
        return tf.constant(0)

    strategy.schedule(inspect_types, args=(numbers, iter(numbers))).result(TIMEOUT)
    assert seen == [(tf.data.DatasetSpec(element), element)]


def test_a_step_can_be_traced_from_the_iterators_type_alone(strategy):  # row 59
    traces = []

    def make_dataset(_):
        traces.append("dataset")
        return tf.data.Dataset.range(10)

    @tf.function
    def step(iterator):
        traces.append("step")
        return next(iterator)

    dataset = strategy.experimental_distribute_datasets_from_function(make_dataset)
    concrete = step.get_concrete_function(iter(dataset))
    by_type = step.get_concrete_function(tf.data.IteratorSpec(dataset.element_spec))
    assert concrete is by_type
    for fn in (concrete, step):
        assert strategy.schedule(fn, args=(iter(dataset),)).result(TIMEOUT) == 0
    assert traces == ["dataset", "step"]


def test_an_iterator_of_the_same_type_needs_no_new_trace_and_another_one_does(strategy, numbers, tens):
    traces = []

    @tf.function
    def step(iterator):
        traces.append(iterator)
        return next(iterator)

    for iterator in (iter(numbers), iter(numbers), iter(tens)):
        strategy.schedule(step, args=(iterator,))
    strategy.join(TIMEOUT)
    assert len(traces) == 1
    floats = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(1.5))
    assert strategy.schedule(step, args=(iter(floats),)).result(TIMEOUT) == 1.5
    assert len(traces) == 2


def test_an_iterator_works_after_its_dataset_was_deleted(strategy):
    dataset = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(5))
    iterator = iter(dataset)
    del dataset
    gc.collect()
    assert on_every_worker(strategy, first, iterator) == [0, 0, 0]


def test_dropped_iterators_are_freed_on_the_client_without_garbage_collection(strategy, numbers):  # row 53
    dropped = []
    gc.disable()
    try:
        for _ in range(6):
            iterator = iter(numbers)
            assert on_every_worker(strategy, first, iterator) == [0, 0, 0]
            dropped.append(weakref.ref(iterator))
            del iterator
        # A worker's thread releases a call just after its result is set.
        wait_until(lambda: all(iterator() is None for iterator in dropped))
    finally:
        gc.enable()


def test_a_dataset_that_is_dropped_is_freed_on_the_client(strategy):
    dataset = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(5))
    strategy.schedule(total, args=(dataset,)).result(TIMEOUT)
    strategy.schedule(first, args=(iter(dataset),)).result(TIMEOUT)
    dropped = weakref.ref(dataset)
    del dataset
    gc.collect()
    wait_until(lambda: dropped() is None)


def test_iterators_that_are_dropped_are_freed_on_the_workers(strategy, shared_cluster):  # row 53
    """An iterator with a buffer has a thread on its worker, so threads are a count of the iterators there."""
    count, slack = 20, 10
    buffered = strategy.experimental_distribute_dataset(tf.data.Dataset.range(100).prefetch(2))
    servers = [psutil.Process(shared_cluster.pid("worker", index)) for index in range(WORKERS)]
    # The pools of a server, which keep their threads, fill with the first calls.
    warm = [iter(buffered) for _ in range(3)]
    for iterator in warm:
        on_every_worker(strategy, first, iterator)
    before = [server.num_threads() for server in servers]

    held = [iter(buffered) for _ in range(count)]
    for iterator in held:
        on_every_worker(strategy, first, iterator)
    assert all(server.num_threads() >= start + count for server, start in zip(servers, before, strict=True))
    del iterator
    held.clear()
    wait_until(lambda: all(server.num_threads() < start + slack for server, start in zip(servers, before, strict=True)))

    for _ in range(count):
        on_every_worker(strategy, first, iter(buffered))
    wait_until(lambda: all(server.num_threads() < start + slack for server, start in zip(servers, before, strict=True)))


@pytest.mark.parametrize(
    "take",
    [next, lambda iterator: iterator.get_next(), list, lambda iterator: tf.function(lambda: next(iterator))()],
    ids=["next", "get_next", "list", "in a function that captures it"],
)
def test_an_iterator_cannot_be_read_on_the_client(numbers, take):  # rows 63, 67
    with pytest.raises(RuntimeError, match=r"strategy\.schedule\(step, args=\(iterator,\)\)"):
        take(iter(numbers))


def test_a_dataset_cannot_be_read_on_the_client(numbers):  # row 63
    with pytest.raises(RuntimeError, match=r"strategy\.schedule\(step, args=\(iterator,\)\)"):
        list(numbers)


def test_a_function_that_is_called_instead_of_scheduled_gets_a_clear_error(numbers):  # row 67
    with pytest.raises(AttributeError, match=r"represents one on each worker.* must be scheduled"):
        first(iter(numbers))
    with pytest.raises(AttributeError, match=r"represents one on each worker.* must be scheduled"):
        total(numbers)


def test_an_iterator_that_is_captured_instead_of_passed_is_refused_when_traced(strategy, numbers):  # row 67
    iterator = iter(numbers)
    with pytest.raises(RuntimeError, match="Pass it as an argument"):
        strategy.schedule(tf.function(lambda: next(iterator)))


def test_an_iterator_is_made_outside_of_the_function(strategy, numbers):
    with pytest.raises(RuntimeError, match="Make the iterator outside of the function"):
        strategy.schedule(tf.function(lambda: next(iter(numbers))))
