"""Per-worker datasets and iterators as arguments of scheduled functions, and their deletion."""

import gc
import weakref

import psutil
import pytest
import tensorflow as tf

from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.per_worker.elements import first, total

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
    def add(features, *, label):
        return next(features["left"]) + next(features["others"][0]) + next(label)

    def added(left, right, label):
        args = ({"left": left, "others": [right]},)
        futures = [strategy.schedule(add, args, {"label": label}, worker=worker) for worker in range(2)]
        return [future.result(TIMEOUT) for future in futures]

    left, right, label = iter(numbers), iter(tens), iter(numbers)
    assert added(left, right, label) == [0, 0]
    assert added(left, right, label) == [12, 12]
    later = iter(numbers)
    assert added(later, right, label) == [22, 22]
    assert added(right, left, later) == [33, 33]


def test_a_dataset_may_be_an_argument_itself(strategy, numbers):  # rows 58, 60
    element = tf.TensorSpec([], tf.int64)
    seen = []

    @tf.function
    def total_of_both(dataset, iterator):
        seen.append((tf.data.DatasetSpec.from_value(dataset), iterator.element_spec))
        return total(dataset) + next(iter(dataset)) + next(iterator)

    for _ in range(2):
        assert on_every_worker(strategy, total_of_both, numbers, iter(numbers)) == [45, 45]
    assert seen == [(tf.data.DatasetSpec(element), element)]


def test_a_step_can_be_traced_from_the_iterators_type_alone(strategy, tens):  # row 59
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
    assert strategy.schedule(step, args=(iter(tens),)).result(TIMEOUT) == 0
    assert traces == ["dataset", "step"]
    floats = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(1.5))
    assert strategy.schedule(step, args=(iter(floats),)).result(TIMEOUT) == 1.5
    assert traces == ["dataset", "step", "step"]


def test_dropped_iterators_are_freed_on_the_client_without_garbage_collection(strategy):  # row 53
    dataset = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(10))
    dropped = []
    gc.disable()
    try:
        for _ in range(6):
            iterator = iter(dataset)
            assert on_every_worker(strategy, first, iterator) == [0, 0]
            dropped.append(weakref.ref(iterator))
            del iterator
        # A worker's thread releases a call just after its result is set.
        wait_until(lambda: all(iterator() is None for iterator in dropped))
    finally:
        gc.enable()
    strategy.schedule(total, args=(dataset,)).result(TIMEOUT)
    iterator, dropped = iter(dataset), weakref.ref(dataset)
    del dataset
    gc.collect()
    assert on_every_worker(strategy, first, iterator) == [0, 0], "it works after its dataset was deleted"
    del iterator
    gc.collect()
    wait_until(lambda: dropped() is None)


def test_iterators_that_are_dropped_are_freed_on_the_workers(strategy, shared_cluster):  # row 53
    """An iterator with a buffer has a thread on its worker, so threads are a count of the iterators there."""
    count, slack = 20, 10
    buffered = strategy.experimental_distribute_dataset(tf.data.Dataset.range(100).prefetch(2))
    servers = [psutil.Process(shared_cluster.pid("worker", index)) for index in range(2)]
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


def test_an_iterator_or_dataset_cannot_be_read_on_the_client(numbers):  # rows 63, 67
    captured = iter(numbers)
    for take in (
        lambda: next(captured),
        captured.get_next,
        lambda: list(captured),
        lambda: list(numbers),
        tf.function(lambda: next(captured)),
    ):
        with pytest.raises(RuntimeError, match=r"strategy\.schedule\(step, args=\(iterator,\)\)"):
            take()
    for call in (lambda: first(captured), lambda: total(numbers)):
        with pytest.raises(AttributeError, match=r"represents one on each worker.* must be scheduled"):
            call()


def test_an_iterator_that_is_captured_instead_of_passed_is_refused_when_traced(strategy, numbers):  # row 67
    iterator = iter(numbers)
    with pytest.raises(RuntimeError, match="Pass it as an argument"):
        strategy.schedule(tf.function(lambda: next(iterator)))
    with pytest.raises(RuntimeError, match="Make the iterator outside of the function"):
        strategy.schedule(tf.function(lambda: next(iter(numbers))))
