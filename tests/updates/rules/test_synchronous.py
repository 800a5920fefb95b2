"""Tests of the synchronous rule: updates equal those of one process with averaged gradients, despite failures."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, Synchronous
from tests.deadline import wait_until
from tests.ps_strategy.sharded.partitioners import partitioned
from tests.updates.descent import descend, value_of
from tests.updates.parts_of_rules import log_of
from tests.updates.small_model import loss_and_gradients, new_model

TIMEOUT = 240
ROUNDS = 4


@pytest.mark.long
def test_a_dense_and_a_sparse_variable_are_updated_by_the_averaged_gradients(strategy):
    random = np.random.default_rng(0)
    expected_dense, expected_rows = np.zeros(3, np.float32), np.zeros([5, 2], np.float32)
    with strategy.scope():
        dense, rows = tf.Variable(lambda: tf.zeros([3])), tf.Variable(lambda: tf.zeros([5, 2]))
        rule = Synchronous(descend, [dense, rows], grads_to_wait=3, embeddings=[rows], learning_rate=0.5)

    @tf.function(reduce_retracing=True)
    def step(gradient, values, indices):
        with rule.pull() as version:
            pass
        return rule.push([gradient, tf.IndexedSlices(values, indices)], version)

    for _ in range(ROUNDS):
        futures = []
        # Repeated indices in one gradient, and in several.
        for indices in ([0, 3], [3, 3], [1, 3, 0]):
            gradient, values = random.normal(size=3), random.normal(size=[len(indices), 2])
            expected_dense -= 0.5 * gradient / 3
            np.subtract.at(expected_rows, indices, 0.5 * values / 3)
            arguments = tf.constant(gradient, tf.float32), tf.constant(values, tf.float32), tf.constant(indices)
            futures.append(strategy.schedule(step, args=arguments))
        assert all(future.result(TIMEOUT) for future in futures)
    np.testing.assert_allclose(dense.numpy(), expected_dense, rtol=1e-5)
    np.testing.assert_allclose(rows.numpy(), expected_rows, rtol=1e-5)
    assert rule.version.numpy() == ROUNDS


def test_adam_gives_the_same_as_one_process_with_averaged_gradients(strategy):
    batches = [tf.random.stateless_normal([3, 8, 4], [number, 7]) for number in range(ROUNDS)]

    with strategy.scope():
        model = new_model()
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
        rule = Synchronous(optimizer, model.trainable_variables, grads_to_wait=3)

    @tf.function
    def step(x):
        return rule.run(lambda x: loss_and_gradients(model, x), x)

    for batch in batches:
        for future in [strategy.schedule(step, args=(x,)) for x in batch]:
            future.result(TIMEOUT)

    alone = new_model()
    adam = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    for batch in batches:
        _, gradients = loss_and_gradients(alone, tf.reshape(batch, [-1, 4]))
        adam.apply(gradients, alone.trainable_variables)
    for shared, own in zip(model.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(shared.numpy(), own.numpy(), rtol=2e-4, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == ROUNDS == rule.version.numpy()


CLIPPED = {
    # The mean of both gradients is (3, 4); the first one alone is (6, 8), and clipped (0.6, 0.8).
    "clipvalue": ({"clipvalue": 0.5}, 1, [0.5, 0.5]),
    "clipnorm": ({"clipnorm": 1.0}, 1, [0.6, 0.8]),
    "clipnorm, sharded": ({"clipnorm": 1.0}, 2, [0.3, 0.4]),
    "global_clipnorm": ({"global_clipnorm": 1.0}, 1, [0.3, 0.4]),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_the_mean_is_clipped_on_its_server_and_gradients_where_no_server_has_all(strategy, name):
    options, parts, step_length = CLIPPED[name]
    with strategy.scope(), partitioned(parts):
        variable = tf.Variable(tf.zeros([2, 1]))
        rule = Synchronous(keras.optimizers.SGD(1.0, **options), [variable], grads_to_wait=2)

    @tf.function
    def push(gradient):
        with rule.pull() as version:
            pass
        return rule.push([gradient], version)

    for gradient in ([[6.0], [8.0]], [[0.0], [0.0]]):
        assert strategy.schedule(push, args=(tf.constant(gradient),)).result(TIMEOUT)
    np.testing.assert_allclose(-variable.numpy()[:, 0], step_length, rtol=1e-5)


def test_a_gradient_of_an_older_version_is_rejected_and_changes_nothing(strategy, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=1, learning_rate=1.0)

    @tf.function
    def push(version):
        return rule.push([tf.ones([3]), tf.ones([4, 2])], version)

    def is_accepted(version):
        return bool(strategy.schedule(push, args=(tf.constant(version, tf.int64),)).result(TIMEOUT))

    assert [is_accepted(version) for version in (0, 0, 1, 0, 2)] == [True, False, True, False, True]
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (3, 5, 2)
    assert statistics.staleness.histogram == (3, 1, 1)
    assert value_of(variables) == -3.0


def new_step(rule, variables):
    """Returns a whole step whose gradient is one, and which returns how often the worker had to compute it."""

    @tf.function
    def step():
        return rule.run(lambda: (tf.constant(1.0), [tf.ones(variable.shape) for variable in variables]))

    return step


def assert_consistent(rule, variables, grads_to_wait):
    """Asserts that the counts agree with each other and with the model, on all servers."""
    statistics = rule.statistics()
    waiting = int(log_of(rule).waiting())
    assert statistics.updates * grads_to_wait + waiting == statistics.pushes - statistics.rejected
    assert value_of(variables) == -float(statistics.updates)
    assert statistics.updates == rule.version.numpy()


@pytest.mark.long
def test_every_minibatch_is_applied_once_although_gradients_are_rejected(strategy, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)
    step = new_step(rule, variables)
    futures = [strategy.schedule(step) for _ in range(31)]
    assert [future.result(TIMEOUT) for future in futures] == [1.0] * 31
    strategy.join(TIMEOUT)
    assert_consistent(rule, variables, 2)
    statistics = rule.statistics()
    assert statistics.updates == 15
    assert statistics.pushes - statistics.rejected == 31 == sum(statistics.clocks.values())
    assert rule.flush() == 1
    assert value_of(variables) == -16.0


@contextlib.contextmanager
def brought_back(strategy, cluster, worker):
    """Restores a worker that is killed within the block."""
    try:
        yield
    finally:
        cluster.restart("worker", worker)
        wait_until(strategy.cluster.workers[worker].healthy)


@pytest.mark.release
def test_a_worker_that_dies_during_a_step_is_not_waited_for(strategy, shared_cluster, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)
    step = new_step(rule, variables)
    strategy.schedule(step).result(TIMEOUT)
    # At any point of a step.
    for worker in (0, 1, 2):
        version = int(rule.version.numpy())
        with brought_back(strategy, shared_cluster, worker):
            futures = [strategy.schedule(step) for _ in range(30)]
            wait_until(lambda least=version + 2 + 3 * worker: rule.version.numpy() >= least)
            shared_cluster.kill("worker", worker)
            assert [future.result(TIMEOUT) for future in futures] == [1.0] * 30
            strategy.join(TIMEOUT)
            assert_consistent(rule, variables, 2)


@pytest.mark.long
def test_waiting_gradients_are_applied_before_training_is_asynchronous(strategy, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=3, learning_rate=1.0)
        asynchronous = Asynchronous(descend, variables, learning_rate=1.0)
    step = new_step(rule, variables)
    for _ in range(4):
        strategy.schedule(step)
    rule.switch_to(asynchronous)
    assert value_of(variables) == -2.0
    for _ in range(3):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    assert value_of(variables) == -5.0
    assert rule.flush() == 0
    assert rule.statistics().updates == 5


@pytest.mark.long
def test_training_becomes_synchronous(strategy, variables):
    with strategy.scope():
        rule = Asynchronous(descend, variables, learning_rate=1.0)
        synchronous = coordinator.updates.Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)
    step = new_step(rule, variables)
    for _ in range(3):
        strategy.schedule(step)
    rule.switch_to(synchronous)
    for _ in range(4):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    assert rule.statistics().updates == 5
    assert value_of(variables) == -5.0
