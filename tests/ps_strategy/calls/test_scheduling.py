"""Tests of what may be scheduled, with which arguments, and of the queue as the caller sees it."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import finish_own_work

TIMEOUT = 60.0


@tf.function
def add(x, y=10, *, z=100):
    return x + y + z


def result(strategy, fn, *args, **kwargs):
    return strategy.schedule(fn, args=args, kwargs=kwargs).result(TIMEOUT)


def test_a_process_has_one_strategy_at_a_time(strategy, shared_cluster):  # row 5
    with pytest.raises(RuntimeError, match="one strategy at a time"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)
    assert result(strategy, add, tf.constant(1)) == 111


def test_the_cluster_and_its_workers_take_functions_as_the_strategy_does(strategy):
    """The RFC has these two for advanced users."""
    where = tf.function(lambda x: x + coordinator.get_current_worker_index())
    one = tf.constant(1, tf.int64)
    assert [worker.schedule(where, (one,)).result(TIMEOUT) for worker in strategy.cluster.workers] == [1, 2]
    assert strategy.cluster.schedule(where, args=(one,), worker=1).result(TIMEOUT) == 2
    assert strategy.cluster.schedule(add, (one,), {"z": 0}).result(TIMEOUT) == 11


def test_only_tensorflow_functions_can_be_scheduled(strategy):  # row 6
    for schedule in (strategy.schedule, strategy.cluster.schedule, strategy.cluster.workers[0].schedule):
        for fn in (len, lambda: 1, "add", None):
            with pytest.raises(TypeError, match=r"takes a tf\.function or a concrete function"):
                schedule(fn)
    with pytest.raises(TypeError, match="args must be a list or tuple"):
        strategy.schedule(add, args=1)
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        strategy.schedule(add, args=(1,), kwargs=[2])
    assert result(strategy, add, tf.constant(1)) == 111, "a refused function is no error of a later call"


def test_variables_with_unknown_dimensions_are_for_the_client(strategy):
    with strategy.scope():
        variable = tf.Variable(tf.ones([2, 3]), shape=tf.TensorShape([None, 3]), name="growing")
    words = r"uses the variable 'growing:0' on a parameter server, whose shape .* has unknown dimensions"
    for fn, args in ((tf.function(lambda: tf.shape(variable)), ()), (tf.function(tf.shape), (variable,))):
        with pytest.raises(ValueError, match=words):
            strategy.schedule(fn, args=args)
    variable.assign(tf.ones([5, 3]))
    assert variable.numpy().shape == (5, 3)


def test_arguments_may_be_anything_that_a_tf_function_takes(strategy, counter):
    @tf.function
    def f(variable, x, ragged, sparse, *rest, **named):
        variable.assign_add(5)
        sums = tf.reduce_sum(ragged, axis=1), tf.sparse.reduce_sum(sparse)
        return {"sum": x["a"][0] + sum(rest), "named": named["scale"] * x["b"], "sums": sums}

    tensors = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 7], [5, 0]])
    structure = {"a": [np.arange(3)], "b": 2.5}
    value = result(strategy, f, counter, structure, *tensors, 1, np.int64(2), scale=tf.constant(4.0))
    np.testing.assert_array_equal(value["sum"], [3, 4, 5])
    np.testing.assert_array_equal(value["sums"][0], [1, 5])
    assert (value["named"], value["sums"][1], counter.numpy()) == (10, 12, 5)


def test_concrete_functions_can_be_scheduled(strategy):
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), z=tf.TensorSpec([], tf.int32))
    assert result(strategy, concrete, tf.constant(1), z=tf.constant(2)) == 13
    assert result(strategy, concrete, tf.constant(1), 10, z=tf.constant(2)) == 13
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32))
    with pytest.raises(TypeError, match="too many positional arguments"):
        strategy.schedule(concrete, args=(1, 10, 100, 1000))
    with pytest.raises(TypeError, match="string"):
        result(strategy, concrete, tf.constant("text"))
    with pytest.raises(TypeError, match="string"):
        strategy.join(TIMEOUT)


def test_methods_partial_functions_and_input_signatures_work(strategy):
    class Scale:
        def __init__(self):
            self.factor = 3

        @tf.function
        def apply(self, x, offset=1):
            return self.factor * x + offset

    scale = Scale()
    assert result(strategy, scale.apply, tf.constant(2)) == 7
    assert result(strategy, tf.function(functools.partial(scale.apply, offset=5)), tf.constant(2)) == 11
    total = tf.function(tf.reduce_sum, input_signature=[tf.TensorSpec([None], tf.float32)])
    assert [result(strategy, total, [1, 2]), result(strategy, total, np.ones(5))] == [3, 5]
    assert total.experimental_get_tracing_count() == 1
    with pytest.raises(TypeError, match=r"\(2, 2\)"):
        strategy.schedule(total, args=(tf.ones((2, 2)),))


def test_a_function_may_create_its_variables_on_its_first_call(strategy):
    class Lazy:
        variable = None

        @tf.function
        def __call__(self):
            if self.variable is None:
                self.variable = tf.Variable(10.0)
            return self.variable.assign_add(1.0)

    lazy = Lazy()
    assert [result(strategy, lazy.__call__) for _ in range(2)] == [11, 12]
    assert "/job:ps" in lazy.variable.device


def test_scheduling_works_inside_and_outside_of_the_scope(strategy, count, counter):  # row 11
    with strategy.scope():
        strategy.schedule(count)
        strategy.join(TIMEOUT)
    strategy.schedule(count)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 2


def test_thousands_of_functions_complete(strategy):  # row 15
    double = tf.function(lambda x: x * 2)
    tensors = [tf.constant(x) for x in range(10)]
    finish_own_work(strategy)
    before = strategy.cluster.statistics()
    futures = [strategy.schedule(double, args=(tensors[number % 10],)) for number in range(5_000)]
    strategy.join(timeout=4 * TIMEOUT)
    assert [future.result(timeout=0) for future in futures] == [number % 10 * 2 for number in range(5_000)]
    after = strategy.cluster.statistics()
    assert (after.finished, after.waiting, after.running) == (before.finished + 5_000, 0, 0)
    wait_until(lambda: sum(worker.finished for worker in strategy.cluster.statistics().workers) >= after.finished)
