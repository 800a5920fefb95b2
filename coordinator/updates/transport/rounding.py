"""What a rule with `transfer_dtype` rounds on its way between a worker and the parameter servers.

    server   float32 variable -- cast --> 16 bits   ==>   16 bits -- cast --> float32   worker
    server   float32 sum    <-- cast -- 16 bits     <==   16 bits <-- cast -- float32   gradient

A tensor is cast on the device that sends it and cast back where it is needed, so that its message has half the size.
Only dense float32 tensors with at least one dimension are rounded. Scalars stay exact, among them learning rates and
counts; so do other dtypes, the rows of embeddings, and `tf.IndexedSlices`.
"""

from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.parts import parts_of
from coordinator.ps_strategy.tensorflow_internals.reads import read_variable


def is_rounded(tensor: Any) -> bool:
    """Returns True if a tensor, a variable or a gradient is one that is rounded."""
    return not isinstance(tensor, tf.IndexedSlices) and tensor.dtype == tf.float32 and tensor.shape.rank != 0


def rounded(tensor: Any, dtype: tf.DType | None) -> Any:
    """Rounds a tensor, where it is, to the nearest numbers of a dtype; returns it as it is if `is_rounded` is False.

    Args:
      tensor: a tensor, or `tf.IndexedSlices`.
      dtype: the dtype of messages; None rounds nothing.
    """
    return tf.cast(tensor, dtype) if dtype is not None and is_rounded(tensor) else tensor


def restored(gradient: Any, variable: Any) -> Any:
    """Returns a gradient in the dtype of its variable."""
    return gradient if gradient.dtype == variable.dtype else tf.cast(gradient, variable.dtype)


def read_rounded(variable: Any, dtype: tf.DType | None) -> tuple[Any, list[Any]]:
    """Reads a variable, without recording it on gradient tapes.

    Args:
      variable: a `tf.Variable` on a parameter server, or one in parts.
      dtype: the dtype of messages; None rounds nothing.

    Returns:
      The value on the worker, in the variable's dtype; and the tensors that are sent for it.
    """
    if dtype is None or not is_rounded(variable):
        value = read_variable(variable)
        return value, [value]
    sent = []
    for part in parts_of(variable):
        with tf.device(part.device):
            sent.append(rounded(read_variable(part), dtype))
    with tf.device(None):
        values = [tf.cast(each, variable.dtype) for each in sent]
        return values[0] if len(values) == 1 else tf.concat(values, 0), sent
