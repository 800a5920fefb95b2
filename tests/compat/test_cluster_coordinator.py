"""Tests of `ClusterCoordinator`: scheduling and results. They follow the meaning of TensorFlow's own tests."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.compat import ClusterCoordinator, RemoteValue


@pytest.fixture
def cluster_coordinator(strategy):
    return ClusterCoordinator(strategy)


@pytest.fixture
def counter(strategy):
    with strategy.scope():
        return tf.Variable(0)


def test_a_strategy_has_one_coordinator(strategy, cluster_coordinator):
    assert ClusterCoordinator(strategy) is cluster_coordinator
    assert ClusterCoordinator(strategy=strategy) is cluster_coordinator
    assert cluster_coordinator.strategy is strategy
    assert cluster_coordinator.cluster is strategy.cluster


def test_another_strategy_is_refused_in_words():
    with pytest.raises(ValueError, match="Import both names from"):
        ClusterCoordinator(tf.distribute.get_strategy())


def test_results_come_back_in_the_functions_structure(cluster_coordinator):
    x = tf.constant(1)

    @tf.function
    def nested():
        return x + 1, (x + 2, x + 3), [x + 4], {"v": x}, None

    value = cluster_coordinator.schedule(nested)
    wanted = 2, (3, 4), [5], {"v": 1}, None
    assert isinstance(value, RemoteValue)
    assert value.fetch() == wanted
    assert cluster_coordinator.fetch(value) == wanted
    assert tf.nest.map_structure(tf.is_tensor, value.get()) == (True, (True, True), [True], {"v": True}, False)
    values = {"a": [value, cluster_coordinator.schedule(nested)], "plain": 7, "text": "x"}
    assert cluster_coordinator.fetch(values) == {"a": [wanted, wanted], "plain": 7, "text": "x"}


def test_functions_that_return_nothing_give_none(cluster_coordinator, counter):
    @tf.function
    def count(by=1):
        counter.assign_add(by)

    # Joining with nothing scheduled returns at once, and so does joining again.
    cluster_coordinator.join()
    for total in (5, 10):
        values = [cluster_coordinator.schedule(count) for _ in range(5)]
        for _ in range(3):
            cluster_coordinator.join()
        assert cluster_coordinator.done()
        assert counter.numpy() == total
        assert cluster_coordinator.fetch(values) == [None] * 5
        assert values[0].get() is None


def test_arguments_are_passed_by_position_and_by_name(cluster_coordinator):
    @tf.function
    def subtract(a, b=1, c=0):
        return a - b - c

    assert cluster_coordinator.schedule(subtract, args=(tf.constant(5),)).fetch() == 4
    assert cluster_coordinator.schedule(subtract, args=[tf.constant(5)], kwargs={"b": tf.constant(3)}).fetch() == 2
    assert cluster_coordinator.schedule(subtract, kwargs={"a": np.int32(5), "b": np.int32(2), "c": 2}).fetch() == 1


def test_anything_but_a_tensorflow_function_is_refused(cluster_coordinator):
    words = r"`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule` only accepts a `tf.function` or a"
    for fn in (lambda: 1, None):
        with pytest.raises(TypeError, match=words):
            cluster_coordinator.schedule(fn)


def test_a_remote_value_is_no_argument_also_within_a_structure(cluster_coordinator):
    double = tf.function(lambda x: 2 * x)
    value = cluster_coordinator.schedule(double, args=(tf.constant(1),))
    for args, kwargs in [((value,), None), (([value],), None), ((), {"x": {"y": value}})]:
        with pytest.raises(ValueError, match="used as an input to scheduled function is not supported"):
            cluster_coordinator.schedule(double, args, kwargs)
    assert cluster_coordinator.schedule(double, args=(value.fetch(),)).fetch() == 4


def test_run_and_reduce_work_whether_scheduled_in_the_scope_or_not(strategy, cluster_coordinator):
    with strategy.scope():
        assert tf.distribute.in_cross_replica_context()
        variable = tf.Variable(1.0)
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        @tf.function
        def step(x):
            def replica_fn(x):
                assert not tf.distribute.in_cross_replica_context()
                total.assign_add(x)
                return x + variable, x - variable

            return strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None)

        assert cluster_coordinator.schedule(step, args=(tf.constant(3.0),)).fetch() == (4, 2)
    assert cluster_coordinator.schedule(step, args=(tf.constant(3.0),)).fetch() == (4, 2)
    assert total.numpy() == 6


def test_gather_and_local_results_are_those_of_one_replica(strategy, cluster_coordinator):
    @tf.function
    def step(x):
        per_replica = strategy.run(lambda x: 2 * x, args=(x,))
        return strategy.gather(per_replica, axis=0), strategy.experimental_local_results(per_replica)

    gathered, [local] = cluster_coordinator.schedule(step, args=(tf.constant([1, 2]),)).fetch()
    assert gathered.tolist() == local.tolist() == [2, 4]
