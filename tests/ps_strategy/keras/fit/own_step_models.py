"""Models whose steps are their own: GANs, autoencoders, contrastive models, as Keras' examples have them."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


def apply(optimizer: Any, tape: tf.GradientTape, loss: Any, variables: list[Any]) -> None:
    optimizer.apply(tape.gradient(loss, variables), variables)


class Gan(keras.Model):
    """Has no `call`; draws latent vectors; has an optimizer and a metric for each of its two networks."""

    def __init__(self, critic_steps: int = 1) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([layers.Dense(6), layers.LeakyReLU(), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6, "relu"), layers.Dense(4)])
        self.latent = keras.random.SeedGenerator(1337)
        self.critic_steps = critic_steps

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def generated(self, real: Any) -> Any:
        return self.generator(keras.random.normal((ops.shape(real)[0], 3), seed=self.latent))

    def train_step(self, real: Any) -> Any:
        for _ in range(self.critic_steps):
            both = ops.concatenate([self.generated(real), real], axis=0)
            labels = ops.concatenate([ops.ones_like(real[:, :1]), ops.zeros_like(real[:, :1])], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(both))
            apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros_like(real[:, :1]), self.discriminator(self.generated(real)))
        apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Sampling(layers.Layer):
    """Adds noise, and the divergence of the encoding as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        self.add_loss(-0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.noise)


class VariationalAutoencoder(keras.Model):
    """Has no `call`; a functional encoder with several outputs, and losses of a layer."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((4,))
        hidden = layers.Dense(6, "relu")(inputs)
        encoded = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        self.encoder = keras.Model(inputs, [*encoded, Sampling()(encoded)])
        self.decoder = keras.Sequential([layers.Dense(4)])
        self.total = keras.metrics.Mean(name="total")

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            error = ops.mean((self.decoder(self.encoder(x)[-1]) - x) ** 2) + sum(self.encoder.losses)
        apply(self.optimizer, tape, error, self.trainable_weights)
        self.total.update_state(error)
        return {"total": self.total.result()}


class Contrastive(keras.Model):
    """An encoder and a head on pairs of noisy views, a slowly following copy, and an own `test_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.target = (keras.Sequential([layers.Dense(4, "relu"), layers.Dense(3)]) for _ in range(2))
        self.head = layers.Dense(3)
        self.views = layers.GaussianNoise(0.1, seed=3)
        self.error = keras.metrics.Mean(name="c_loss")

    def compared(self, x: Any) -> Any:
        target = ops.stop_gradient(self.target(self.views(x, training=True)))
        return ops.mean((self.head(self.encoder(self.views(x, training=True))) - target) ** 2)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            error = self.compared(x)
        apply(self.optimizer, tape, error, self.encoder.trainable_weights + self.head.trainable_weights)
        for follower, leader in zip(self.target.weights, self.encoder.weights, strict=True):
            follower.assign(0.9 * follower + 0.1 * leader)
        self.error.update_state(error)
        return {"c_loss": self.error.result()}

    def test_step(self, data: Any) -> Any:
        self.error.update_state(self.compared(data[0]))
        return {"c_loss": self.error.result()}


class Distiller(keras.Model):
    """Keras' own step with a `compute_loss` that asks a second network."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu"), layers.Dense(2)]) for _ in range(2)
        )

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        taught = keras.losses.kl_divergence(ops.softmax(self.teacher(x)), ops.softmax(y_pred))
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True) + taught)


class Narrowed(keras.Model):
    """Calls itself with other inputs than the batches, so that it cannot be built from these."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(5), layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        return super().train_step((data[0][:, :3], data[1]))
