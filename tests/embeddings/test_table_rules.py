"""Tests of tables among the variables of update rules."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant
from coordinator.updates import Asynchronous, Synchronous
from tests.embeddings.tables import DIM, TIMEOUT, make_table

STEPS = 12


@pytest.mark.long
@pytest.mark.parametrize("kind", [Asynchronous, Synchronous])
def test_a_rule_gives_a_table_the_gradients_that_it_accepts(strategy, kind):
    table = make_table(strategy, initializer=Constant(0.0))
    with strategy.scope():
        variable = tf.Variable(tf.zeros([DIM]))
        options = {} if kind is Asynchronous else {"grads_to_wait": 2}
        rule = kind(keras.optimizers.SGD(1.0), [table.variable, variable], **options)

    @tf.function
    def step():
        def body():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup([1, 2, 2], training=True)) + tf.reduce_sum(variable)
            return loss, tape.gradient(loss, [table.variable, variable])

        return rule.run(body)

    for _ in range(STEPS):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    accepted = rule.statistics().pushes - rule.statistics().rejected
    assert accepted >= STEPS
    np.testing.assert_allclose(table.lookup([1, 2]), [[-0.5 * accepted] * DIM, [-1.0 * accepted] * DIM])
    assert table.statistics().steps == accepted
    np.testing.assert_allclose(variable, np.full([DIM], -1.0 * rule.statistics().updates))


def test_a_rule_may_be_given_no_gradient_of_a_table(strategy):
    table = make_table(strategy)
    with strategy.scope():
        variable = tf.Variable(1.0)
        rule = Asynchronous(keras.optimizers.SGD(1.0), [variable, table.variable])

    @tf.function
    def step():
        with rule.pull() as version:
            pass
        return rule.push([tf.constant(1.0), None], version)

    assert strategy.schedule(step).result(TIMEOUT)
    assert (variable.numpy(), table.statistics().steps) == (0.0, 0)
