"""Tests that `fit` trains models with their own steps, as Keras' examples have them, as without a strategy."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import coordinator

RNG = np.random.default_rng(5)
X = RNG.normal(size=(48, 4)).astype("float32")


def apply(optimizer: Any, tape: tf.GradientTape, loss: Any, variables: list[Any]) -> None:
    optimizer.apply(tape.gradient(loss, variables), variables)


class Gan(keras.Model):
    """Has no `call`; draws latent vectors; has an optimizer and a metric for each of its two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([layers.Dense(6), layers.LeakyReLU(), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6, "relu"), layers.Dense(4)])
        self.latent = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def judged(self, count: Any, real: Any, labels: Any) -> Any:
        generated = self.generator(keras.random.normal((count, 3), seed=self.latent))
        judgement = self.discriminator(ops.concatenate([generated, real], axis=0))
        return ops.mean(ops.binary_crossentropy(labels, judgement, from_logits=True))

    def train_step(self, real: Any) -> Any:
        ones, zeros = ops.ones_like(real[:, :1]), ops.zeros_like(real[:, :1])
        for _ in range(2):
            with tf.GradientTape() as tape:
                d_loss = self.judged(ops.shape(real)[0], real, ops.concatenate([ones, zeros], axis=0))
            apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = self.judged(ops.shape(real)[0], real[:0], zeros)
        apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def variables(model: keras.Model) -> list[Any]:
    """Returns the values of all variables, each optimizer's included, in an order that does not depend on names."""
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return [variable.numpy() for owner in (model, *optimizers) for variable in owner.variables]


@pytest.mark.long
def test_one_step_after_the_other_gives_the_same_as_without_a_strategy(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    results = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = Gan()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01))
        logs: list[Any] = []
        for first in (0, 16, 32):
            history = model.fit(X[first : first + 16], batch_size=16, shuffle=False, verbose=0).history
            logs.extend(history.values())
        results.append([*logs, *variables(model)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-3, atol=1e-5)


def test_an_optimizer_beside_the_models_own_must_be_made_in_the_scope(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    outside = keras.optimizers.Adam(name="outside")
    with strategy.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(), outside)
    with pytest.raises(ValueError, match="not on parameter servers, 'outside/iteration' among them"):
        model.fit(X, verbose=0)
