"""Tests of the synchronous rule: updates equal those of one process with averaged gradients, despite failures."""

import keras
import numpy as np
import tensorflow as tf

from coordinator.updates import Synchronous
from tests.updates.descent import TIMEOUT, new_rule, pushing_step, run, value_of
from tests.updates.small_model import loss_and_gradients, new_model

ROUNDS = 3


def test_adam_gives_the_same_as_one_process_with_averaged_gradients(strategy):
    batches = [tf.random.stateless_normal([3, 8, 4], [number, 7]) for number in range(ROUNDS)]

    def new():
        return new_model(), keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))

    with strategy.scope():
        model, optimizer = new()
        rule = Synchronous(optimizer, model.trainable_variables, grads_to_wait=3)

    @tf.function
    def step(x):
        return rule.run(lambda x: loss_and_gradients(model, x), x)

    alone, adam = new()
    for batch in batches:
        for future in [strategy.schedule(step, args=(x,)) for x in batch]:
            future.result(TIMEOUT)
        _, gradients = loss_and_gradients(alone, tf.reshape(batch, [-1, 4]))
        adam.apply(gradients, alone.trainable_variables)
    for shared, own in zip(model.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(shared.numpy(), own.numpy(), rtol=2e-4, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == ROUNDS == rule.version.numpy()


def test_the_mean_is_clipped_on_its_server_and_gradients_where_no_server_has_all(strategy):
    """The mean of both gradients is (3, 4); the first one alone is (6, 8), and clipped (0.6, 0.8)."""
    for options, step_length in (
        ({"clipnorm": 1.0}, [0.6, 0.8]),
        ({"global_clipnorm": 1.0}, [0.3, 0.4]),
    ):
        with strategy.scope():
            variable = tf.Variable(tf.zeros([2, 1]))
            rule = Synchronous(keras.optimizers.SGD(1.0, **options), [variable], grads_to_wait=2)
        step = pushing_step(rule, lambda gradient: [gradient])
        for gradient in ([[6.0], [8.0]], [[0.0], [0.0]]):
            assert run(strategy, step, None, tf.constant(gradient))
        np.testing.assert_allclose(-variable.numpy()[:, 0], step_length, rtol=1e-5, err_msg=f"{options}")


def test_a_gradient_of_an_older_version_is_rejected_and_changes_nothing(strategy, variables):
    rule = new_rule(strategy, "synchronous", variables)
    push = tf.function(lambda version: rule.push([tf.ones([3]), tf.ones([4, 2])], version))
    accepted = [bool(run(strategy, push, None, tf.constant(version, tf.int64))) for version in (0, 0, 1, 0, 2)]
    assert accepted == [True, False, True, False, True]
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (3, 5, 2)
    assert statistics.staleness.histogram == (3, 1, 1)
    assert value_of(variables) == -3.0


def test_every_minibatch_is_applied_once_although_gradients_are_rejected(strategy, variables):
    rule = new_rule(strategy, Synchronous, variables, grads_to_wait=2)
    gradients = [tf.ones_like(variable) for variable in variables]
    step = tf.function(lambda: rule.run(lambda: (tf.constant(1.0), gradients)))
    futures = [strategy.schedule(step) for _ in range(31)]
    assert [future.result(TIMEOUT) for future in futures] == [1.0] * 31
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert statistics.updates == rule.version.numpy() == -value_of(variables) == 15
    assert statistics.pushes - statistics.rejected == 31 == sum(statistics.clocks.values())
    assert rule.flush() == 1
    assert value_of(variables) == -16.0
