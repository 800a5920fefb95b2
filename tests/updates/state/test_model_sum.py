"""Tests of the sum of models: the mean of the current ones, with workers that join, leave, or are late."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex
from coordinator.updates.state.model_sum import ModelSum
from tests.ps_strategy.every_worker import TIMEOUT


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        first = tf.Variable(tf.zeros([2]))
        with strategy.extended.colocate_vars_with(first):
            return [first, tf.Variable(tf.zeros([1, 2], tf.bfloat16))]


@pytest.fixture
def model_sum(strategy, variables):
    with strategy.scope():
        lock = ServerMutex("tests/average_board", variables[0].device)
        return ModelSum([0, 1], variables, lock)


@pytest.fixture
def bring(strategy, model_sum):
    """`bring(worker, model, connection=1, generation=1)` returns the mean and whether the model was accepted."""

    @tf.function(autograph=False)
    def exchange(row, worker, connection, generation):
        with tf.device(model_sum.device):
            values = [row[:2], tf.cast(tf.reshape(row[2:], [1, 2]), tf.bfloat16)]
            (first, second), is_accepted = model_sum.exchange(values, worker, connection, generation)
            return tf.concat([first, tf.reshape(tf.cast(second, tf.float32), [-1])], 0), is_accepted

    def call(worker, model, connection=1, generation=1):
        numbers = [tf.constant(number, tf.int64) for number in (worker, connection, generation)]
        mean, is_accepted = strategy.schedule(exchange, (tf.constant(model, tf.float32), *numbers)).result(TIMEOUT)
        return mean.tolist(), bool(is_accepted)

    return call


def test_the_mean_is_of_the_latest_model_of_each_worker(bring, variables):
    assert bring(5, [1, 2, 3, 4]) == ([1, 2, 3, 4], True)
    assert bring(0, [3, 4, 5, 6]) == ([2, 3, 4, 5], True)
    assert bring(5, [7, 8, 9, 10]) == ([5, 6, 7, 8], True)
    assert variables[0].numpy().tolist() == [5, 6]
    assert variables[1].numpy().tolist() == [[7, 8]]


def test_a_removed_model_no_longer_counts_and_its_worker_may_add_another(bring, model_sum):
    for worker, number in enumerate((1.0, 3.0, 8.0)):
        bring(worker, [number] * 4)
    model_sum.remove(2, is_lost=False)
    assert bring(0, [1.0] * 4)[0] == [2.0] * 4
    assert bring(2, [5.0] * 4) == ([3.0] * 4, True)


def test_removing_an_unknown_worker_changes_nothing(bring, model_sum):
    bring(0, [1.0] * 4)
    model_sum.remove(7, is_lost=True)
    assert bring(1, [3.0] * 4)[0] == [2.0] * 4


def test_a_model_from_the_connection_of_a_lost_worker_is_not_accepted(bring, model_sum, variables):
    bring(0, [1.0] * 4, connection=3)
    model_sum.remove(0, is_lost=True)
    bring(1, [5.0] * 4)
    assert bring(0, [9.0] * 4, connection=3) == ([9.0] * 4, False)
    assert variables[0].numpy().tolist() == [5, 5]
    assert bring(0, [7.0] * 4, connection=4) == ([6.0] * 4, True)
    assert bring(0, [9.0] * 4, connection=3) == ([9.0] * 4, False)


def test_a_newer_generation_removes_all_models_and_an_older_one_is_rejected(bring, variables):
    bring(0, [1.0] * 4, generation=1)
    bring(1, [3.0] * 4, generation=1)
    assert bring(1, [5.0] * 4, generation=2) == ([5.0] * 4, True)
    assert bring(0, [9.0] * 4, generation=1) == ([9.0] * 4, False)
    assert variables[0].numpy().tolist() == [5, 5]
    assert bring(0, [7.0] * 4, generation=2) == ([6.0] * 4, True)


def test_removing_a_worker_undoes_the_unfinished_change_of_its_cancelled_call(bring, model_sum):
    bring(0, [1.0] * 4)
    bring(1, [3.0] * 4)
    # It has replaced the model, but not changed the sum.
    model_sum.total.assign_add([100.0] * 4)
    model_sum.remove(1, is_lost=False)
    assert bring(0, [2.0] * 4)[0] == [2.0] * 4


def test_a_model_with_nan_is_removed_with_its_worker(bring, model_sum):
    bring(0, [1.0] * 4)
    assert np.isnan(bring(1, [np.nan] * 4)[0]).all()
    model_sum.remove(1, is_lost=False)
    assert bring(0, [1.0] * 4)[0] == [1.0] * 4


@pytest.mark.long
def test_the_mean_does_not_drift_however_often_models_are_replaced(strategy, bring, model_sum):
    values = np.random.default_rng(1).normal(size=[30, 4]).astype(np.float32) * 1e3
    for number, value in enumerate(values):
        mean, _ = bring(number % 3, value)
    exact = values[-3:].astype(np.float64).mean(0)
    np.testing.assert_allclose(mean[:2], exact.astype(np.float32)[:2], rtol=2e-7)
    np.testing.assert_allclose(model_sum.total.numpy()[:2], exact[:2] * 3, rtol=1e-12)


def test_models_of_float64_are_averaged_in_float64(strategy):
    with strategy.scope():
        variable = tf.Variable(tf.zeros([1], tf.float64))
        model_sum = ModelSum([0], [variable], ServerMutex("tests/average_board_float64", variable.device))

    @tf.function(autograph=False)
    def exchange(value, worker):
        with tf.device(model_sum.device):
            one = tf.constant(1, tf.int64)
            return model_sum.exchange([value], tf.identity(worker), one, one)[0]

    for worker, value in enumerate((1.0, 1.0 + 2.0**-50)):
        arguments = tf.constant([value], tf.float64), tf.constant(worker, tf.int64)
        [mean] = strategy.schedule(exchange, arguments).result(TIMEOUT)
    assert mean[0] == variable.numpy()[0] == 1.0 + 2.0**-51


def test_a_variable_whose_shape_is_not_known_is_refused(strategy):
    with strategy.scope():
        variable = tf.Variable(tf.zeros([1]), shape=[None])
    with pytest.raises(ValueError, match="known shape"):
        ModelSum([0], [variable], ServerMutex("tests/average_board_refused", variable.device))
