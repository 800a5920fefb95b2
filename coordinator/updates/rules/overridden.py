"""Calls the methods that user-defined rules override, and checks what they return.

AutoGraph converts their conditions, as it does in a step. Their operations are added to the graph of the caller: reads
of variables in a separate function would not wait for the lock that the caller holds.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def decided(method: Callable[[Any, Any], Any], worker: Any, number: Any) -> Any:
    """Returns what `may_begin` or `is_accepted` decides, a bool scalar.

    Raises:
      TypeError: the method returns something else.
    """
    found = _called(method, worker, number)
    if not _is_like(found, tf.bool, tf.TensorShape([])):
        raise TypeError(f"{_named(method)} must return a bool scalar, got {found!r}.")
    return found


def combined_by(method: Callable[..., Any], variable: tf.Variable, gradients: Any, workers: Any, pulled: Any) -> Any:
    """Returns what `combine` makes of some gradients, of their dtype and of the variable's shape.

    Raises:
      TypeError: the method returns something else.
    """
    found = _called(method, variable, gradients, workers, pulled)
    if not _is_like(found, gradients.dtype, variable.shape):
        raise TypeError(
            f"{_named(method)} must return {gradients.dtype.name} of shape {variable.shape} for the variable "
            f"{variable.name}, got {found!r}. `gradients` has one for each push: their first dimension has to go."
        )
    return tf.ensure_shape(found, variable.shape)


def _called(method: Any, *arguments: Any) -> Any:
    converted = tf.autograph.to_graph(method.__func__)
    found = converted(method.__self__, *arguments)
    return tf.convert_to_tensor(found) if isinstance(found, bool) else found


def _is_like(found: Any, dtype: tf.DType, shape: tf.TensorShape) -> bool:
    return tf.is_tensor(found) and found.dtype == dtype and found.shape.is_compatible_with(shape)


def _named(method: Any) -> str:
    return f"{type(method.__self__).__name__}.{method.__name__}"
