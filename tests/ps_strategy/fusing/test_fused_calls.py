"""Tests that functions in one fused call have the same results and effects as in separate calls."""

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.queueing.closure import ErrorScope
from coordinator.workers import cluster
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, TIMEOUT, FusedCalls


@pytest.fixture
def fused(strategy, monkeypatch):
    return FusedCalls(strategy, monkeypatch)


def test_each_call_has_its_own_arguments_and_its_own_result(strategy, fused):
    @tf.function
    def fn(x, array, y, text, nothing, shared, constant=3):
        return {
            "sum": array + shared * tf.cast(y, tf.float32),
            "pair": (y * constant, tf.strings.join([text, "!"])),
            "rows": tf.boolean_mask(x, x[:, 0] >= 0),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(y % 3), [y % 3]),
            "others": [y > 3, tf.shape(x), tf.cast(x, tf.bfloat16), tf.sparse.from_dense(x)],
            "nothing": nothing,
        }

    shared = tf.constant(1.0)

    def arguments(number):
        # Arrays and tensors are equal for the function, but are passed differently.
        x = np.full([2, 3], number, np.float32)
        return tf.constant(x), x, np.int32(number), tf.constant(f"text {number}"), None, shared

    alone = strategy.schedule(fn, arguments(0), worker=0).result(TIMEOUT)
    results = [future.result(timeout=0) for future in fused.run(fn, map(arguments, range(COUNT)))]
    # Changing a result does not change those of other steps.
    results[0]["sum"] -= 1
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result["sum"], np.full([2, 3], 2 * number if number else -1))
        assert result["pair"][0] == 3 * number
        assert result["pair"][1] == f"text {number}!".encode()
        assert result["rows"].shape == (2, 3)
        assert result["ragged"].to_list() == [list(range(number % 3))]
        assert bool(result["others"][0]) == (number > 3)
        # The types are those of a single call.
        tf.nest.assert_same_structure(alone, result, check_types=True, expand_composites=True)
        for one, other in zip(tf.nest.flatten(alone), tf.nest.flatten(result), strict=True):
            assert type(one) is type(other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert fused.sizes.count(STEPS) >= 1


def test_each_step_begins_after_the_one_before_has_ended(strategy, fused):
    with strategy.scope():
        per_worker = tf.Variable(0, dtype=tf.int64, per_worker_variable=True)
        log = tf.Variable(tf.zeros([2, 100], tf.int64))
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)

    @tf.function
    def step(words):
        before = per_worker.read_value()
        matrix = tf.fill([100, 100], tf.cast(before, tf.float32) * 1e-3)
        for _ in range(4):
            matrix = tf.tanh(matrix @ matrix)
        with tf.control_dependencies([matrix]):
            per_worker.assign(before + 1)
        worker = coordinator.get_current_worker_index()
        log.scatter_nd_update([[worker, before]], [before + 1])
        return worker, before, table.lookup(words)

    seen = {worker: [] for worker in range(2)}
    for future in fused.run(step, [(tf.constant(["b", "a", "c"]),)] * COUNT):
        worker, before, found = future.result(timeout=0)
        seen[int(worker)].append(int(before))
        assert list(found) == [2, 1, -1]
    for worker, numbers in seen.items():
        assert numbers == list(range(len(numbers)))
        assert list(log.numpy()[worker, : len(numbers)]) == [number + 1 for number in numbers]
    assert fused.sizes


def test_an_endless_iterator_advances_with_each_fused_step(strategy, fused):
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(1000).repeat()))
    take = tf.function(lambda iterator: (coordinator.get_current_worker_index(), next(iterator)))
    seen = {worker: [] for worker in range(2)}
    # An iterator is known to be endless once it is created.
    for worker, numbers in seen.items():
        numbers.append(int(strategy.schedule(take, (iterator,), worker=worker).result(TIMEOUT)[1]))
    for _ in range(2):
        for future in fused.run(take, [(iterator,)] * COUNT):
            worker, number = future.result(timeout=0)
            seen[int(worker)].append(int(number))
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())
    assert sum(map(len, seen.values())) == 2 + 2 * COUNT
    assert fused.sizes


def test_steps_with_iterators_of_unknown_size_or_the_results_of_others_run_alone(strategy, fused):
    dataset = tf.data.Dataset.range(COUNT).filter(lambda _: True)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    take = tf.function(lambda iterator: next(iterator) + 0)
    fused.run(take, [(iterator,)] * (COUNT - 1))
    plus_one = tf.function(lambda x: x + 1.0)
    first = strategy.schedule(plus_one, (0.0,))
    futures = fused.run(plus_one, [(first,)] * COUNT)
    assert [future.result(timeout=0) for future in futures] == [2.0] * COUNT
    assert not fused.sizes


def test_an_error_is_raised_only_by_the_call_that_failed(fused, monkeypatch):
    monkeypatch.setattr(cluster, "error_scope", lambda kind, options: ErrorScope.FUTURE)

    @tf.function
    def inverse(x):
        tf.debugging.assert_none_equal(x, 0.0, message="there is none")
        return 1.0 / x

    futures = fused.run(inverse, [(tf.constant(float(number)),) for number in range(COUNT)])
    assert isinstance(futures[0].exception(timeout=0), tf.errors.InvalidArgumentError)
    assert "there is none" in str(futures[0].exception(timeout=0))
    for number, future in enumerate(futures[1:], 1):
        assert np.isclose(future.result(timeout=0), 1 / number)
    assert fused.sizes
