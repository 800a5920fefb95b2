"""What a function has read of a variable already, and whether the variable has that value still.

A value is present for as long as the function itself has not changed the variable: what other workers do meanwhile may
come before a read or after it, whichever way the function is written.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def is_present_value(variable: Any, tensor: Any) -> bool:
    """Whether a tensor was read from a variable that the function has not changed since.

    In a branch, it may have been read before the branch.
    """
    if tensor.dtype != variable.dtype:
        return False
    handle = _captured(tensor.graph, variable.handle)
    if tensor.op.type == "ReadVariableOp":
        # A function has one tensor for each handle that it captured.
        return tensor.op.inputs[0] is handle and not _is_changed_after(handle, tensor.op)
    outer = _around_branch(tensor.graph)
    if outer is None or (handle is not None and _changes(handle)):
        return False
    read = next((outside for outside, inside in tensor.graph.captures if inside is tensor), None)
    return read is not None and read.graph is outer and is_present_value(variable, read)


def value_read_before(variable: Any) -> Any | None:
    """The present value of a variable, if the function that is being traced has read it already.

    None as well where the next operation is told to wait for others: a read there is meant to be one of its own.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    around: Any = graph
    while around is not None:
        # Private: nothing public tells what `tf.control_dependencies` are in force.
        if around._current_control_dependencies():
            return None
        around = _around_branch(around)
    return _value_read_in(graph, variable)


def _value_read_in(graph: Any, variable: Any) -> Any | None:
    handle = _captured(graph, variable.handle)
    if handle is not None:
        reads = [each for each in handle.consumers() if each.type == "ReadVariableOp" and not each.control_inputs]
        if reads and not _is_changed_after(handle, reads[-1]):
            return reads[-1].outputs[0]
        if _changes(handle):
            return None
    outer = _around_branch(graph)
    read = None if outer is None else _value_read_in(outer, variable)
    return None if read is None else graph.capture(read)


def _captured(graph: Any, handle: Any) -> Any | None:
    """The tensor that a function has for a handle, if it has captured it."""
    return next((inside for outside, inside in graph.captures if outside is handle), None)


def _around_branch(graph: Any) -> Any | None:
    """The graph that a branch is part of, None for any other graph: the body of a loop runs more than once."""
    # Private: nothing public leads there, nor tells a branch from a loop or a function.
    return graph.outer_graph if isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph) else None


def _changes(handle: Any) -> set[str]:
    return {change.name for change in handle.consumers() if change.type not in _READS}


def _is_changed_after(handle: Any, read: Any) -> bool:
    changes = _changes(handle)
    if not changes:
        return False
    names = [operation.name for operation in handle.graph.get_operations()]
    return not changes.isdisjoint(names[names.index(read.name) :])
