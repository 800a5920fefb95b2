"""Tests that functions in one fused call have the same results and effects as in separate calls."""

import keras
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


# Arrays and tensors are equal for the function, but are passed differently.
@pytest.mark.parametrize("is_tensor", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tensors", "arrays"])
def test_each_call_has_its_own_arguments_and_its_own_result(fused, is_tensor):
    @tf.function
    def fn(x, y, text, nothing, constant=3):
        return {
            "sum": x + tf.cast(y, tf.float32),
            "pair": (y * constant, tf.strings.join([text, "!"])),
            "rows": tf.boolean_mask(x, x[:, 0] >= 0),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(y % 3), [y % 3]),
            "flag": y > 3,
            "nothing": nothing,
        }

    def arguments(number):
        x = np.full([2, 3], number, np.float32)
        return (tf.constant(x) if is_tensor else x), tf.constant(number), tf.constant(f"text {number}"), None

    for number, future in enumerate(fused.run(fn, map(arguments, range(COUNT)))):
        result = future.result(timeout=0)
        np.testing.assert_array_equal(result["sum"], np.full([2, 3], 2 * number))
        assert result["sum"].dtype == np.float32
        assert result["pair"][0] == 3 * number
        assert result["pair"][1] == f"text {number}!".encode()
        assert result["rows"].shape == (2, 3)
        assert isinstance(result["ragged"], tf.RaggedTensor)
        assert result["ragged"].to_list() == [list(range(number % 3))]
        assert bool(result["flag"]) == (number > 3)
        assert result["nothing"] is None
    assert fused.sizes.count(STEPS) >= 1


def test_results_are_of_the_same_types_as_those_of_single_calls(strategy, fused):
    @tf.function
    def fn(x):
        return x, tf.shape(x), tf.reduce_sum(x), [tf.constant("a"), tf.cast(x, tf.bfloat16)], tf.sparse.from_dense(x)

    array = np.ones([2], np.float32)
    alone = strategy.schedule(fn, (array,), worker=0).result(TIMEOUT)
    for future in fused.run(fn, [(array,)] * COUNT):
        result = future.result(timeout=0)
        tf.nest.assert_same_structure(alone, result, check_types=True, expand_composites=True)
        for one, other in zip(tf.nest.flatten(alone), tf.nest.flatten(result), strict=True):
            assert type(one) is type(other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert fused.sizes


def test_changing_a_result_does_not_change_the_results_of_other_steps(fused):
    @tf.function
    def fn():
        return tf.zeros([3])

    first, *others = [future.result(timeout=0) for future in fused.run(fn, [()] * COUNT)]
    first += 1
    assert not np.any(others)
    assert fused.sizes


def test_only_calls_with_arguments_of_the_same_shapes_are_fused(fused):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def total(x):
        return tf.reduce_sum(x)

    sizes = [1, 1, 1, 1, 2, 2, 2, 2, 3] * 3
    futures = fused.run(total, [(np.ones(size, np.float32),) for size in sizes])
    assert [future.result(timeout=0) for future in futures] == sizes
    assert fused.sizes


def test_each_step_begins_after_the_one_before_has_ended(strategy, fused):
    with strategy.scope():
        per_worker = tf.Variable(0, dtype=tf.int64, per_worker_variable=True)
        log = tf.Variable(tf.zeros([3, 100], tf.int64))

    @tf.function
    def step():
        before = per_worker.read_value()
        matrix = tf.fill([100, 100], tf.cast(before, tf.float32) * 1e-3)
        for _ in range(4):
            matrix = tf.tanh(matrix @ matrix)
        with tf.control_dependencies([matrix]):
            per_worker.assign(before + 1)
        worker = coordinator.get_current_worker_index()
        log.scatter_nd_update([[worker, before]], [before + 1])
        return worker, before

    seen = {worker: [] for worker in range(3)}
    for future in fused.run(step, [()] * COUNT):
        worker, before = future.result(timeout=0)
        seen[int(worker)].append(int(before))
    for worker, numbers in seen.items():
        assert numbers == list(range(len(numbers)))
        assert list(log.numpy()[worker, : len(numbers)]) == [number + 1 for number in numbers]
    assert fused.sizes


def test_an_endless_iterator_advances_with_each_fused_step(strategy, fused):
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(1000).repeat()))

    @tf.function
    def take(iterator):
        return coordinator.get_current_worker_index(), next(iterator)

    seen = {worker: [] for worker in range(3)}
    # An iterator is known to be endless once it is created.
    for worker, numbers in seen.items():
        numbers.append(int(strategy.schedule(take, (iterator,), worker=worker).result(TIMEOUT)[1]))
    for _ in range(2):
        for future in fused.run(take, [(iterator,)] * COUNT):
            worker, number = future.result(timeout=0)
            seen[int(worker)].append(int(number))
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())
    assert sum(map(len, seen.values())) == 3 + 2 * COUNT
    assert fused.sizes


def test_steps_with_iterators_of_unknown_size_are_not_fused(strategy, fused):
    dataset = tf.data.Dataset.range(COUNT).filter(lambda _: True)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def take(iterator):
        number = next(iterator)
        tf.debugging.assert_less(number, tf.constant(COUNT, tf.int64))
        return number

    futures = [strategy.schedule(take, (iterator,), worker=0)]
    futures += fused.run(take, [(iterator,)] * (COUNT - 1))
    assert len({int(future.result(timeout=0)) for future in futures}) <= COUNT
    assert not fused.sizes
    for _ in range(COUNT):
        strategy.schedule(take, (iterator,), worker=0)
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.join(TIMEOUT)


def test_counters_of_an_optimizer_and_a_metric_are_exact(strategy, fused):
    with strategy.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 3))
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(layer.trainable_variables)
        metric = keras.metrics.Mean()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        metric.update_state(loss)
        return loss

    futures = fused.run(step, [(np.full([2, 3], number, np.float32),) for number in range(COUNT)])
    assert int(optimizer.iterations.numpy()) == COUNT
    assert float(metric.count.numpy()) == COUNT
    losses = [float(future.result(timeout=0)) for future in futures]
    assert np.isclose(float(metric.result()), np.mean(losses), rtol=1e-3)
    assert fused.sizes


def test_each_worker_uses_its_own_tables_and_per_worker_variables(strategy, fused):
    with strategy.scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), -1
        )
        per_worker = tf.Variable(0, dtype=tf.int64, per_worker_variable=True)

    @tf.function
    def step(words):
        return coordinator.get_current_worker_index(), per_worker.assign_add(1), table.lookup(words)

    counts = dict.fromkeys(range(3), 0)
    for future in fused.run(step, [(tf.constant(["b", "a", "c"]),) for _ in range(COUNT)]):
        worker, count, found = future.result(timeout=0)
        counts[int(worker)] += 1
        assert count == counts[int(worker)]
        assert list(found) == [2, 1, -1]
    assert fused.sizes


def test_an_error_is_raised_only_by_the_call_that_failed(strategy, fused, monkeypatch):
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


def test_a_function_that_takes_the_result_of_another_runs_alone(strategy, fused):
    @tf.function
    def plus_one(x):
        return x + 1.0

    first = strategy.schedule(plus_one, (0.0,))
    futures = fused.run(plus_one, [(first,)] * COUNT)
    assert [future.result(timeout=0) for future in futures] == [2.0] * COUNT
    assert not fused.sizes


def test_a_variable_argument_is_shared_by_all_fused_steps(strategy, fused):
    with strategy.scope():
        counters = [tf.Variable(0.0), tf.Variable(0.0)]

    @tf.function
    def add(variable):
        variable.assign_add(1.0)

    fused.run(add, [(counters[number // COUNT],) for number in range(2 * COUNT)])
    assert [counter.numpy() for counter in counters] == [COUNT, COUNT]
    assert fused.sizes
