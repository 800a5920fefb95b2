"""Tests of what docs/keras/exactness.md calls exact: racing workers change large variables as one process does.

Small variables are changed so quickly that workers hardly ever meet. Gradients are the same in each step, so that the
order of steps makes no difference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 240.0
ROWS, WIDTH, STEPS, UPDATES_IN_A_STEP = 2048, 64, 50, 2
INITIAL = np.linspace(-1.0, 1.0, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)

optimizers = keras.optimizers

# Settings with which each is predictable: as averages forget nothing, the weights change equally in each step.
PREDICTED = {
    "SGD": (lambda: optimizers.SGD(0.1), ["weights"]),
    "Adagrad": (lambda: optimizers.Adagrad(0.1), ["accumulator"]),
    "Adadelta": (lambda: optimizers.Adadelta(0.1, rho=1.0, epsilon=1.0), ["weights"]),
    "RMSprop": (lambda: optimizers.RMSprop(0.1, rho=1.0, epsilon=1.0), ["weights"]),
    "Ftrl": (lambda: optimizers.Ftrl(0.1), ["accumulator"]),
    "Lion": (lambda: optimizers.Lion(0.1), ["weights"]),
    "clipnorm": (lambda: optimizers.SGD(0.1, clipnorm=0.5), ["weights"]),
    "clipvalue": (lambda: optimizers.SGD(0.1, clipvalue=0.5), ["weights"]),
    "global_clipnorm": (lambda: optimizers.SGD(0.1, global_clipnorm=0.5), ["weights"]),
    "LossScaleOptimizer": (
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 2.0**10, dynamic_growth_steps=8),
        ["weights"],
    ),
    "MultiOptimizer": (lambda: optimizers.MultiOptimizer(lambda _: optimizers.SGD(0.1)), ["weights"]),
}


class Training:
    """A large table, an optimizer, and a step that applies gradients of ones, one after another."""

    def __init__(self, name, is_sparse):
        make, self.predicted = PREDICTED[name]
        self.weights = keras.Variable(INITIAL, name="table")
        self.optimizer = make()
        self.optimizer.build([self.weights])
        self.is_sparse = is_sparse

    def step(self):
        for _ in range(UPDATES_IN_A_STEP):
            self.update()

    def update(self):
        table = self.weights.value
        with tf.GradientTape() as tape:
            rows = tf.gather(table, tf.range(ROWS)) if self.is_sparse else table
            loss = self.optimizer.scale_loss(tf.reduce_sum(rows))
        self.optimizer.apply([tape.gradient(loss, table)], [self.weights])

    def values(self):
        named = {each.path.rsplit("_", 1)[-1]: each for each in self.optimizer.variables}
        return [np.asarray({**named, "weights": self.weights}[each]) for each in self.predicted]


DEFAULT = {"Adagrad-sparse", "clipnorm-dense"}


@pytest.mark.parametrize(
    ("name", "is_sparse"),
    [
        pytest.param(name, is_sparse, id=case, marks=() if case in DEFAULT else pytest.mark.long)
        for name in PREDICTED
        for is_sparse in (False, True)
        for case in [f"{name}-{'sparse' if is_sparse else 'dense'}"]
    ],
)
def test_racing_workers_update_large_variables_as_one_process_does(strategy, name, is_sparse):
    with strategy.scope():
        training = Training(name, is_sparse)
    step = tf.function(training.step)
    for _ in range(STEPS):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    here = Training(name, is_sparse)
    one_step = tf.function(here.step)
    for _ in range(STEPS):
        one_step()
    for value, expected in zip(training.values(), here.values(), strict=True):
        assert not np.allclose(value, INITIAL)
        # A norm is a sum, whose order may be different on the servers.
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    assert int(training.optimizer.iterations) == STEPS * UPDATES_IN_A_STEP


def race(strategy, step):
    for number in range(STEPS):
        strategy.schedule(step, args=(tf.constant(number),))
    strategy.join(TIMEOUT)


@pytest.mark.parametrize(
    "change",
    [
        lambda total, x: total.assign_add(x),
        pytest.param(lambda total, x: total.assign_sub(-x), marks=pytest.mark.long),
        lambda total, x: total.assign(total + x),
        pytest.param(lambda total, x: total.assign(total - -x), marks=pytest.mark.long),
    ],
    ids=["assign_add", "assign_sub", "assign a sum", "assign a difference"],
)
@pytest.mark.parametrize("kind", [pytest.param(tf.Variable, marks=pytest.mark.long), keras.Variable])
def test_no_addition_to_a_large_variable_is_lost(strategy, kind, change):
    with strategy.scope():
        total = kind(np.zeros([ROWS, WIDTH], np.float32))

    @tf.function
    def step(_):
        change(total, tf.ones([ROWS, WIDTH]))

    race(strategy, step)
    np.testing.assert_array_equal(np.asarray(total), np.full([ROWS, WIDTH], STEPS))


@pytest.mark.long
def test_metrics_with_large_states_count_every_batch(strategy):
    classes = 512
    with strategy.scope():
        overlap, mean = keras.metrics.MeanIoU(classes), keras.metrics.Mean()
        area, score = keras.metrics.AUC(num_thresholds=20_001), keras.metrics.F1Score(average="macro")
        determination = keras.metrics.R2Score()
    labels = np.arange(classes)

    @tf.function
    def step(_):
        overlap.update_state(labels, labels)
        mean.update_state(tf.ones([classes]))
        area.update_state(labels % 2, labels / classes)
        score.update_state(tf.eye(classes), tf.eye(classes))
        determination.update_state(tf.ones([2, classes]), tf.zeros([2, classes]))

    race(strategy, step)
    np.testing.assert_array_equal(overlap.total_cm, STEPS * np.eye(classes))
    assert (float(mean.total), float(mean.count)) == (classes * STEPS, classes * STEPS)
    np.testing.assert_array_equal(area.true_positives + area.false_negatives, np.full([20_001], classes // 2 * STEPS))
    np.testing.assert_array_equal(area.false_positives + area.true_negatives, np.full([20_001], classes // 2 * STEPS))
    np.testing.assert_array_equal(score.true_positives, np.full([classes], STEPS))
    np.testing.assert_array_equal(determination.total_mse, np.full([classes], 2 * STEPS))


def test_a_layer_that_counts_in_a_large_variable_counts_every_call(strategy):
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(ROWS, WIDTH), initializer="zeros", trainable=False)

        def call(self, x):
            self.calls.assign(self.calls + x)
            return x

    with strategy.scope():
        layer = Counting()
        layer.build([1])
    race(strategy, tf.function(lambda _: tf.reduce_sum(layer(tf.ones([ROWS, WIDTH])))))
    np.testing.assert_array_equal(layer.calls, np.full([ROWS, WIDTH], STEPS))


@pytest.mark.long
def test_large_moving_statistics_are_means_of_whole_batches(strategy):
    features = 50_000
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.8)
        layer.build([None, features])

    @tf.function
    def step(number):
        middle, away = tf.cast(number % 7 - 3, tf.float32), tf.cast(1 + number % 4, tf.float32)
        batch = tf.stack([tf.fill([features], middle - away), tf.fill([features], middle + away)])
        return tf.reduce_sum(layer(batch, training=True))

    race(strategy, step)
    # The initial values, 0 and 1, are among those of batches.
    for statistic, least, most in ((layer.moving_mean, -3.0, 3.0), (layer.moving_variance, 1.0, 16.0)):
        value = np.asarray(statistic)
        assert least < value[0] < most
        # An assignment sets the whole variable: no part of another worker's value is left.
        np.testing.assert_allclose(value, np.full([features], value[0]), rtol=1e-5)
