"""Pushes that reach one server only, as those of a worker that dies after that."""

import tensorflow as tf

from tests.updates.parts_of_rules import model_of


def ids(*numbers):
    """Returns ids of pushes of workers that do not exist."""
    return tf.constant([[900 + number, 1, 1] for number in numbers], tf.int64)


def add(rule, store, push, value):
    """Adds a gradient to the rows of a server: the same number for all variables."""
    model = model_of(rule)
    numbers = model.by_device[store.device]

    @tf.function
    def run():
        with tf.device(store.device):
            gradients = {number: tf.fill(model.variables[number].shape, value) for number in numbers}
            store.add(tf.identity(push), store.row(gradients, [tf.identity(1.0)]))

    run()
