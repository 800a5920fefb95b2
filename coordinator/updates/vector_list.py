"""A list of int64 vectors on a server: a TensorList, for a variable whose shape is known in part only will not do."""

from typing import Any

import tensorflow as tf


def new_vector_list(width: int) -> tf.Variable:
    """A variable that has a list, without any vector. To be made in the strategy's scope.

    Args:
      width: how many numbers a vector has.
    """
    return tf.Variable(lambda: vector_list(tf.zeros([0, width], tf.int64)), dtype=tf.variant, shape=[], trainable=False)


def vector_list(vectors: Any) -> Any:
    """The list of some vectors, int64 [n, width]."""
    return tf.raw_ops.TensorListFromTensor(tensor=vectors, element_shape=tf.constant([vectors.shape[1]]))


def vectors_of(rows: Any, width: int) -> Any:
    """The vectors in a list, int64 [n, width]."""
    stacked = tf.raw_ops.TensorListStack(
        input_handle=rows, element_shape=tf.constant([width]), element_dtype=tf.int64, num_elements=-1
    )
    return tf.ensure_shape(stacked, [None, width])
