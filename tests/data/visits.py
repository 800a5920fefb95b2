"""A step that counts, on two parameter servers, how often the model has seen each example in each epoch."""

import numpy as np
import tensorflow as tf

from coordinator.data import arrays


class Visits:
    """Counts visits of the examples of a source whose first part is the example's number.

    Args:
      strategy: whose parameter servers hold the counts.
      source: gives numbers, or a tuple that begins with them.
      epochs: how many.
    """

    def __init__(self, strategy, source, epochs=1):
        shape = [epochs, source.size]
        with strategy.scope():
            self.counts = [tf.Variable(lambda: tf.zeros(shape, tf.int32), trainable=False) for _ in range(2)]

        @tf.function
        def step(positions):
            read = source.read(positions)
            ids = tf.reshape(tf.cast(read[0] if isinstance(read, tuple) else read, tf.int64), [-1])
            epoch = (positions[0] if isinstance(positions, tuple) else positions)[0]
            at = tf.stack([tf.fill(tf.shape(ids), epoch), ids], 1)
            for count in self.counts:
                count.scatter_nd_add(at, tf.ones_like(ids, tf.int32))
            return ids

        self.step = step

    def summary(self):
        """Returns, for each server, how many visits were missing and how many were too many."""
        counts = [count.numpy() for count in self.counts]
        return [(int((each == 0).sum()), int(np.maximum(each - 1, 0).sum())) for each in counts]


EXACT = [(0, 0), (0, 0)]


def numbered(size):
    """Returns a source of that many numbers, with their squares."""
    numbers = np.arange(size)
    return arrays(numbers, numbers.astype(np.float32) ** 2)
