"""Variables that keep every addition, however many workers add at once.

Keras and many programs write `total.assign(total + x)`: a read, an addition, and an assignment, between which other
workers do the same, so that additions are lost. In a graph, the three are recognized for what they mean, and one
addition is made on the server.
"""

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

_SUMS = ("Add", "AddV2")
_DIFFERENCES = ("Sub",)
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


class _Additive:
    """Assigning a variable its own value plus something adds that, atomically."""

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Assigns, adds or subtracts; what it returns is as ever."""
        variable: Any = self
        change = _change_of(variable, value)
        if change is None:
            return super().assign(value, use_locking, name, read_value)  # type: ignore[misc]  # of the other base
        add, amount = change
        if amount.shape != variable.shape:
            amount = tf.broadcast_to(amount, variable.shape)
        return (variable.assign_add if add else variable.assign_sub)(amount, use_locking, name, read_value)


@functools.cache
def _additive(kind: Any) -> Any:
    return type(f"Additive{kind.__name__}", (_Additive, kind), {"__module__": __name__})


def make_additions_atomic(variable: Any) -> None:
    """From now on, `variable.assign(variable + x)` and `- x` lose nothing in functions that run at the same time.

    That holds where the value was read in the same function, and not changed by it in between. Other assignments are as
    they were.
    """
    # Private: the classes of variables have no public names, and are chosen where nobody can choose others. A function
    # that makes a variable when it is traced first has a class of its own for it.
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        kind: Any = type(variable)
        variable.__class__ = _additive(kind)


def _change_of(variable: Any, value: Any) -> tuple[bool, Any] | None:
    """Whether `value` is what was read from `variable` plus (True) or minus (False) something, and that."""
    graph = tf.compat.v1.get_default_graph()
    if not (isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value) and value.graph is graph):
        return None
    if value.op.type not in (*_SUMS, *_DIFFERENCES) or not variable.shape.is_fully_defined():
        return None
    if not variable.shape.is_compatible_with(value.shape):
        # Let the assignment say what is wrong.
        return None
    left, right = value.op.inputs
    if _is_present_value(variable, left):
        return value.op.type in _SUMS, right
    return (True, left) if value.op.type in _SUMS and _is_present_value(variable, right) else None


def _is_present_value(variable: Any, tensor: Any) -> bool:
    """Whether a tensor was read from a variable that the function has not changed since."""
    if tensor.op.type != "ReadVariableOp" or tensor.dtype != variable.dtype:
        return False
    handle = tensor.op.inputs[0]
    # A function has one tensor for each handle that it captured.
    if handle is not tensor.graph.capture(variable.handle):
        return False
    changes = {change.name for change in handle.consumers() if change.type not in _READS}
    if not changes:
        return True
    names = [operation.name for operation in tensor.graph.get_operations()]
    return changes.isdisjoint(names[names.index(tensor.op.name) :])
