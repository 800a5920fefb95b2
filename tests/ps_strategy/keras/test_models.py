"""Tests of models and of layers with state in custom loops: with racing workers, and with one step at a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
STEPS = 50
FEATURES = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
LABELS = (FEATURES @ [[1.0], [-2.0], [0.5], [1.0]]).astype(np.float32)


class Training:
    """A model, an optimizer, and a step that trains the one with the other."""

    def __init__(self):
        seeds = map(keras.initializers.GlorotUniform, (1, 2))
        layers = zip((8, 1), ("tanh", None), seeds, strict=True)
        self.model = model = keras.Sequential([keras.layers.Dense(*each[:2], True, each[2]) for each in layers])
        self.optimizer = optimizer = keras.optimizers.Adam(0.03)

        @tf.function
        def step(features, labels):
            with tf.GradientTape() as tape:
                error = keras.losses.mean_squared_error(labels, model(features, training=True))
                loss = tf.reduce_mean(tf.cast(error, tf.float32))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        self.step = step

    def variables(self):
        """Returns a model's variables, except seeds, which differ from layer to layer."""
        return [*self.model.weights, *self.optimizer.variables]


@pytest.mark.long
def test_mixed_precision_computes_in_16_bits_and_stores_32(strategy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        here = Training()
        with strategy.scope():
            there = Training()
        first_losses = []
        for first in (0, 8, 16, 24):
            batch = FEATURES[first : first + 8], LABELS[first : first + 8]
            first_losses.append(strategy.schedule(there.step, args=batch).result())
            np.testing.assert_allclose(first_losses[-1], here.step(*batch), rtol=0.02)
        for one, other in zip(there.variables(), here.variables(), strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0.02, atol=0.002)
    finally:
        keras.config.set_dtype_policy(before)
    losses = [strategy.schedule(there.step, args=(FEATURES, LABELS)) for _ in range(STEPS)]
    strategy.join()
    assert np.mean(strategy.local_results(losses)[-5:]) < np.mean(first_losses)
    assert int(there.optimizer.iterations) == 4 + STEPS
    output = strategy.schedule(tf.function(there.model), args=(FEATURES,)).result()
    assert output.dtype == "bfloat16"
    assert {variable.dtype for variable in there.variables() if variable.shape.rank} == {"float32"}


CALLS, MOMENTUM = 30, 0.8
# Of each batch.
MEANS = [float(number % 7 - 3) for number in range(CALLS)]
DEVIATIONS = [1.0 + number % 4 for number in range(CALLS)]
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
    expected = [tuple(here(tf.ones([64]), training=True).numpy().tolist()) for _ in range(5 + CALLS)]
    # One step at a time is as in one process.
    for mask in expected[:5]:
        assert tuple(strategy.schedule(drop).result(TIMEOUT).tolist()) == mask
    futures = [strategy.schedule(drop) for _ in range(CALLS)]
    masks = [tuple(future.result(TIMEOUT).tolist()) for future in futures]
    np.testing.assert_array_equal(layer.seed_generator.state, [7, 5 + CALLS])
    # Workers that draw at the same time may draw the same mask for their batches.
    assert set(masks) <= set(expected[5:])
    assert len(set(masks)) >= CALLS / len(strategy.cluster.workers)
