"""Functions that read elements of a worker's data."""

import tensorflow as tf


@tf.function
def first(iterator):
    return next(iterator)


@tf.function
def total(elements):
    result = tf.constant(0, tf.int64)
    for element in elements:
        result += element
    return result
