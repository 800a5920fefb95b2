"""Assignments that are additions.

Keras and many programs write `total.assign(total + x)`: a read, an addition, and an assignment, between which other
workers do the same, so that additions are lost. In a graph, the three are recognized for what they mean.
"""

from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.present_values import is_present_value

_SUMS = ("Add", "AddV2")
_DIFFERENCES = ("Sub",)


def change_of(variable: Any, value: Any) -> tuple[bool, Any] | None:
    """What is added to a variable, or subtracted from it, when it is assigned a value.

    Returns:
      Whether it is added (True) or subtracted (False), and what; None if the value is not the variable's present one
      plus or minus something.
    """
    graph = tf.compat.v1.get_default_graph()
    if not (isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value) and value.graph is graph):
        return None
    if value.op.type not in (*_SUMS, *_DIFFERENCES) or not variable.shape.is_fully_defined():
        return None
    if not variable.shape.is_compatible_with(value.shape):
        # Let the assignment say what is wrong.
        return None
    left, right = value.op.inputs
    if is_present_value(variable, left):
        return value.op.type in _SUMS, right
    return (True, left) if value.op.type in _SUMS and is_present_value(variable, right) else None
