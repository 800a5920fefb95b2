"""Trains on handwritten digits with its own update rule: delay compensation (DC-ASGD, arXiv 1609.08326).

coordinator run --workers 3 --ps 2 examples/own_rule/train.py

A gradient g of the weights w0 comes late, when they are w. g + s * g * g * (w - w0) is about the gradient of w: g * g
approximates the second derivative.
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coordinator
from coordinator import updates


class DelayCompensated(updates.Accumulating):
    """Corrects each gradient for what has changed since its worker has pulled, then has the optimizer apply it."""

    sends_pulled_values = True  # combine gets the weights that gradients were computed on

    def __init__(self, optimizer, variables, *, strength, **settings):
        super().__init__(optimizer, variables, **settings)
        self.strength = strength

    def combine(self, variable, gradients, workers, pulled):
        """Returns the gradient that the optimizer applies; called on the parameter server of the variable."""
        del workers
        corrected = gradients + self.strength * gradients * gradients * (variable - pulled)
        return tf.reduce_mean(corrected, axis=0)  # of one gradient, if grads_to_wait is 1


def train(strategy, strength, epochs):
    images, labels = load_digits(return_X_y=True)
    images, held_out_images, labels, held_out_labels = train_test_split(
        images.astype("float32") / 16, labels, test_size=0.25, random_state=0, stratify=labels
    )

    def dataset_fn(_):
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        return dataset.shuffle(len(images)).repeat().batch(32).prefetch(2)

    with strategy.scope():
        layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        rule = DelayCompensated(keras.optimizers.SGD(0.2), model.trainable_variables, strength=strength)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=rule, loss=loss, metrics=["accuracy"])
    model.fit(dataset_fn, epochs=epochs, steps_per_epoch=150, verbose=2)
    guesses = model(held_out_images).numpy().argmax(axis=1)
    print(rule.statistics())
    print(f"held-out accuracy {(guesses == held_out_labels).mean():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strength", type=float, default=1.0, help="of the correction; 0 is none")
    parser.add_argument("--epochs", type=int, default=4, help="of 150 steps each")
    arguments = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        train(strategy, arguments.strength, arguments.epochs)
