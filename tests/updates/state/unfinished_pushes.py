"""Pushes that go no further than to a server, as those of a worker that dies after that."""

import tensorflow as tf

from coordinator.updates.sent_gradients import SentGradients


def ids(*numbers):
    """Ids of pushes of a worker that is not there."""
    return tf.constant([[900 + number, 1, 1] for number in numbers], tf.int64)


def add(rule, server, push, value):
    """Adds a gradient to what a server keeps: a number everywhere."""
    store, columns = server.store, server.columns
    variables = [rule._parts.model.variables[number] for number in columns.numbers]

    @tf.function
    def run():
        with tf.device(store.device):
            gradients = [tf.fill(variable.shape, value) for variable in variables]
            sent = SentGradients(store.device, columns.numbers, gradients, [], 0)
            store.add(tf.identity(push), columns.row(sent, [tf.identity(1.0)]))

    run()
