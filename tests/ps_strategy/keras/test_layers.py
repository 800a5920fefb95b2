"""Tests of layers with state: the moving statistics of batch normalization, and the seeds of dropout."""

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
STEPS = 60
MOMENTUM = 0.8


def batch(number):
    """Returns batch `number`, whose mean and variance the next two functions return."""
    return tf.constant([[mean_of(number) - 1.0 - number % 4], [mean_of(number) + 1.0 + number % 4]])


def mean_of(number):
    return float(number % 7 - 3)


def variance_of(number):
    return (1.0 + number % 4) ** 2


@pytest.fixture
def normalization(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=MOMENTUM)
        layer.build([None, 1])
    return layer


def in_training(layer):
    @tf.function
    def step(x):
        return layer(x, training=True)

    return step


def test_moving_statistics_with_one_step_at_a_time_equal_those_of_one_process(strategy, normalization):
    step = in_training(normalization)
    mean, variance = 0.0, 1.0
    for number in range(5):
        normalized = strategy.schedule(step, args=(batch(number),)).result(TIMEOUT)
        np.testing.assert_allclose(normalized[:, 0], [-1.0, 1.0], atol=1e-3)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * mean_of(number)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * variance_of(number)
    assert float(normalization.moving_mean[0]) == pytest.approx(mean, rel=1e-5)
    assert float(normalization.moving_variance[0]) == pytest.approx(variance, rel=1e-5)


def test_moving_statistics_of_racing_workers_are_a_mean_over_batches(strategy, normalization):
    step = in_training(normalization)
    for number in range(STEPS):
        strategy.schedule(step, args=(batch(number),))
    strategy.join(TIMEOUT)
    means, variances = ([of(number) for number in range(STEPS)] for of in (mean_of, variance_of))
    assert min(means) < float(normalization.moving_mean[0]) < max(means)
    # The initial 1 is the least of the variances as well.
    assert min(variances) < float(normalization.moving_variance[0]) < max(variances)


def masks_of(futures):
    return [tuple(future.result(TIMEOUT).tolist()) for future in futures]


@pytest.fixture
def dropout(strategy):
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=7)
        layer.build([64])
    return layer


@pytest.fixture
def drop(dropout):
    @tf.function
    def step():
        return dropout(tf.ones([64]), training=True)

    return step


def test_dropout_with_one_step_at_a_time_equals_that_of_one_process(strategy, drop):
    here = keras.layers.Dropout(0.5, seed=7)
    for _ in range(5):
        [mask] = masks_of([strategy.schedule(drop)])
        assert mask == tuple(here(tf.ones([64]), training=True).numpy().tolist())


def test_seeds_of_racing_workers_advance_by_one_for_each_call(strategy, dropout, drop):
    futures = [strategy.schedule(drop) for _ in range(STEPS)]
    masks = masks_of(futures)
    np.testing.assert_array_equal(dropout.seed_generator.state, [7, STEPS])
    # The same masks as in one process; workers that draw at the same time may draw the same one for their batches.
    here = keras.layers.Dropout(0.5, seed=7)
    assert set(masks) <= {tuple(here(tf.ones([64]), training=True).numpy().tolist()) for _ in range(STEPS)}
    assert len(set(masks)) >= STEPS / len(strategy.cluster.workers)
