"""Tests of the replica context of a scheduled function, in which run, reduce and updates work."""

import logging

import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 60.0


def replica_id():
    """Returns the replica's number, which exists only inside of a replica context."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def result(strategy, fn, *args):
    return strategy.schedule(fn, args=args).result(TIMEOUT)


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return tf.Variable(0.0)


def test_run_outside_of_a_scheduled_function_works_and_warns_each_time(strategy, caplog):  # row 10
    for _ in range(2):
        caplog.clear()
        assert strategy.run(lambda x: x + replica_id(), args=(tf.constant(5),)) == 5
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "strategy.run was called outside of a scheduled function" in record.getMessage()

        caplog.clear()
        assert result(strategy, tf.function(lambda: strategy.run(replica_id))) == 0
        assert not caplog.records
    assert strategy.reduce("SUM", tf.constant([1, 2]), axis=0) == 3
    assert strategy.gather(tf.constant([3]), axis=0).numpy().tolist() == [3]
    for name in ("reduce", "gather"):
        assert f"strategy.{name} was called outside of a scheduled function" in caplog.text


def test_run_and_reduce_work_in_a_scheduled_function(strategy):  # row 11
    @tf.function
    def step(x):
        assert tf.distribute.get_replica_context() is not None
        doubled = strategy.run(lambda value: value * 2 + replica_id(), args=(x,))
        gathered = strategy.gather(strategy.run(lambda value: [value], args=(x,))[0][tf.newaxis], axis=0)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, doubled, axis=None), gathered

    assert result(strategy, step, tf.constant(21)) == (42, [21])
    with strategy.scope():
        assert result(strategy, step, tf.constant(21)) == (42, [21])


def test_an_update_by_the_first_replica_is_made_once_for_each_call(strategy, variable):  # row 12
    @tf.function
    def step():
        def update_if_first():
            if replica_id() == 0:
                variable.assign_add(1.0)
            return 1

        return strategy.reduce("SUM", strategy.run(update_if_first), axis=None)

    futures = [strategy.schedule(step) for _ in range(10)]
    strategy.join(TIMEOUT)
    assert strategy.local_results(futures) == [1] * 10
    assert variable.numpy() == 10


def test_the_mean_over_a_batch_of_a_distributed_dataset(strategy, variable):  # row 18
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors([1.0, 3.0]).repeat())

    @tf.function
    def step(iterator):
        mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(lambda x: x * 2, (next(iterator),)), axis=0)
        variable.assign_add(mean)
        return mean

    iterator = iter(dataset)
    futures = [strategy.schedule(step, args=(iterator,)) for _ in range(6)]
    strategy.join(TIMEOUT)
    assert strategy.local_results(futures) == [4.0] * 6
    assert variable.numpy() == 24
    strategy.join(TIMEOUT)


def test_variables_that_aggregate_are_updated_by_every_call(strategy):  # rows 100, 102
    with strategy.scope():
        plain = tf.Variable(1.0)
        variables = [
            tf.Variable(1.0, aggregation=tf.VariableAggregation[name]) for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
        ]
    # There is one replica, so no wrapper is needed.
    assert {type(variable) for variable in variables} == {type(plain)}

    @tf.function
    def step():
        def update():
            for variable in variables:
                variable.assign(variable * 2.0)
            return [variable.assign_add(3.0) for variable in variables]

        return strategy.run(update)

    assert [result(strategy, step) for _ in range(2)] == [[5] * 3, [13] * 3]
    strategy.run(lambda: [variable.assign_sub(3.0) for variable in variables])
    assert [variable.numpy() for variable in variables] == [10] * 3


def test_reductions_in_the_replica_context_are_over_one_replica(strategy):
    @tf.function
    def step(x):
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync == 1
        return {
            "all_reduce": context.all_reduce(tf.distribute.ReduceOp.MEAN, x),
            "all_gather": context.all_gather(x, axis=0),
            "gather": strategy.run(lambda: tf.distribute.get_replica_context().all_gather(x, axis=0)),
            "merge_call": context.merge_call(lambda _, value: value + 1.0, args=(x - 1.0,)),
        }

    for name, value in result(strategy, step, tf.constant([1.0, 2.0])).items():
        np.testing.assert_array_equal(value, [1.0, 2.0], name)
