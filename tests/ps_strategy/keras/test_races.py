"""Tests of what docs/keras/exactness.md calls exact: racing workers change large variables as one process does.

Small variables are changed so quickly that workers hardly ever meet. Gradients are the same in each step, so that the
order of steps makes no difference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 240.0
ROWS, WIDTH, STEPS, UPDATES_IN_A_STEP = 2048, 64, 30, 2
INITIAL = np.linspace(-1.0, 1.0, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)

optimizers = keras.optimizers

# Settings with which each is predictable: as averages forget nothing, the weights change equally in each step.
PREDICTED = {
    "SGD": lambda: optimizers.SGD(0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.1, rho=1.0, epsilon=1.0),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 2.0**10, dynamic_growth_steps=8),
}
BY_ACCUMULATOR = {"Adagrad", "Ftrl"}


class Training:
    """A large table, an optimizer, and a step that applies gradients of ones, one after another."""

    def __init__(self, name, is_sparse):
        self.weights = keras.Variable(INITIAL, name="table")
        self.optimizer = PREDICTED[name]()
        self.optimizer.build([self.weights])
        accumulators = [each for each in self.optimizer.variables if each.path.endswith("accumulator")]
        self.predicted = accumulators[0] if name in BY_ACCUMULATOR else self.weights
        self.is_sparse = is_sparse
        self.step = tf.function(self.updates)

    def updates(self):
        table = self.weights.value
        for _ in range(UPDATES_IN_A_STEP):
            with tf.GradientTape() as tape:
                rows = tf.gather(table, tf.range(ROWS)) if self.is_sparse else table
                loss = self.optimizer.scale_loss(tf.reduce_sum(rows))
            self.optimizer.apply([tape.gradient(loss, table)], [self.weights])


@pytest.mark.parametrize(
    ("name", "is_sparse"),
    [
        pytest.param(name, is_sparse, marks=() if name == "Adagrad" and is_sparse else pytest.mark.long)
        for name in PREDICTED
        for is_sparse in (False, True)
    ],
)
def test_racing_workers_update_large_variables_as_one_process_does(strategy, name, is_sparse):
    with strategy.scope():
        training = Training(name, is_sparse)
    here = Training(name, is_sparse)
    for _ in range(STEPS):
        strategy.schedule(training.step)
        here.step()
    strategy.join(TIMEOUT)
    assert not np.allclose(training.predicted, INITIAL)
    # A norm is a sum, whose order may be different on the servers.
    np.testing.assert_allclose(training.predicted, here.predicted, rtol=1e-5, atol=1e-5)
    assert int(training.optimizer.iterations) == STEPS * UPDATES_IN_A_STEP


def test_no_addition_to_a_large_variable_is_lost(strategy):
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(ROWS, WIDTH), initializer="zeros", trainable=False)

        def call(self, x):
            self.calls.assign(self.calls + x)
            return x

    with strategy.scope():
        added, subtracted, summed, difference = (keras.Variable(np.zeros([ROWS, WIDTH], np.float32)) for _ in range(4))
        plain = tf.Variable(np.zeros([ROWS, WIDTH], np.float32))
        layer, overlap = Counting(), keras.metrics.MeanIoU(512)
        layer.build([1])

    @tf.function
    def step():
        ones = tf.ones([ROWS, WIDTH])
        added.assign_add(ones)
        subtracted.assign_sub(-ones)
        summed.assign(summed + ones)
        difference.assign(difference - -ones)
        plain.assign_add(ones)
        layer(ones)
        overlap.update_state(tf.range(512), tf.range(512))

    for _ in range(STEPS):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    for total in (added, subtracted, summed, difference, plain, layer.calls):
        np.testing.assert_array_equal(np.asarray(total), np.full([ROWS, WIDTH], STEPS))
    np.testing.assert_array_equal(overlap.total_cm, STEPS * np.eye(512))
