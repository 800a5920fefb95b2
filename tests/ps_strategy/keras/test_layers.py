"""Tests of layers with state: the moving statistics of batch normalization, and the seeds of dropout."""

import keras
import numpy as np
import tensorflow as tf

TIMEOUT = 120.0
STEPS = 60
MOMENTUM = 0.8
# Of each batch.
MEANS = [float(number % 7 - 3) for number in range(STEPS)]
DEVIATIONS = [1.0 + number % 4 for number in range(STEPS)]
BATCHES = [tf.constant([[mean - away], [mean + away]]) for mean, away in zip(MEANS, DEVIATIONS, strict=True)]
VARIANCES = [away**2 for away in DEVIATIONS]


def test_moving_statistics_of_racing_workers_are_a_mean_over_batches(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=MOMENTUM)
        layer.build([None, 1])
    step = tf.function(lambda x: layer(x, training=True))
    # One step at a time is as in one process.
    expected = np.array([0.0, 1.0])
    for batch, *statistics in zip(BATCHES[:5], MEANS, VARIANCES, strict=False):
        normalized = strategy.schedule(step, args=(batch,)).result(TIMEOUT)
        np.testing.assert_allclose(normalized[:, 0], [-1.0, 1.0], atol=1e-3)
        expected = MOMENTUM * expected + (1 - MOMENTUM) * np.array(statistics)
    found = np.array([layer.moving_mean.numpy()[0], layer.moving_variance.numpy()[0]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)

    for batch in BATCHES:
        strategy.schedule(step, args=(batch,))
    strategy.join(TIMEOUT)
    assert min(MEANS) < float(layer.moving_mean[0]) < max(MEANS)
    # The initial 1 is the least of the variances as well.
    assert min(VARIANCES) < float(layer.moving_variance[0]) < max(VARIANCES)


def test_seeds_of_racing_workers_advance_by_one_for_each_call(strategy):
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=7)
        layer.build([64])

    @tf.function
    def drop():
        return layer(tf.ones([64]), training=True)

    here = keras.layers.Dropout(0.5, seed=7)
    expected = [tuple(here(tf.ones([64]), training=True).numpy().tolist()) for _ in range(5 + STEPS)]
    # One step at a time is as in one process.
    for mask in expected[:5]:
        assert tuple(strategy.schedule(drop).result(TIMEOUT).tolist()) == mask
    futures = [strategy.schedule(drop) for _ in range(STEPS)]
    masks = [tuple(future.result(TIMEOUT).tolist()) for future in futures]
    np.testing.assert_array_equal(layer.seed_generator.state, [7, 5 + STEPS])
    # Workers that draw at the same time may draw the same mask for their batches.
    assert set(masks) <= set(expected[5:])
    assert len(set(masks)) >= STEPS / len(strategy.cluster.workers)
