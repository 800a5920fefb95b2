"""Decides which reads of variables a loop, a branch or a called function may leave to the operation that runs it.

All are functions of the operations, given as `NodeDef`s, and of the functions that they call, given as `FunctionDef`s.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES

# `tf.Variable.read_value` reads in its own name scope.
_READ_VALUE = re.compile(r"(^|/)Read(_\d+)?/ReadVariableOp(_\d+)?$")


def is_on_server(node: Any) -> bool:
    """Returns True if an operation is placed on a parameter server, where reads of its variables send nothing."""
    return tf.DeviceSpec.from_string(node.device).job == "ps"


def is_hoistable(node: Any) -> bool:
    """Returns True if an operation is a read of a variable that may be made elsewhere, as far as it says itself."""
    is_plain_read = node.op == "ReadVariableOp" and len(node.input) == 1 and not _READ_VALUE.search(node.name)
    return is_plain_read and not is_on_server(node)


def reads_of(function: Any, number: int) -> list[Any]:
    """Returns the reads of an argument that may be hoisted."""
    argument = function.signature.input_arg[number].name
    return [node for node in function.node_def if argument in node.input and is_hoistable(node)]


def may_hoist(operation: str, functions: Sequence[Any], number: int, variable: tf.TensorSpec) -> bool:
    """Returns True if an operation may be given the value of a variable in place of the handle that it is given now.

    Args:
      operation: its type.
      functions: those that it calls.
      number: that of the handle among their arguments.
      variable: the shape and type of the variable.
    """
    for function in functions:
        argument = function.signature.input_arg[number].name
        uses = [node for node in function.node_def if argument in node.input]
        if not all(node.op == "VariableShape" or is_hoistable(node) for node in uses):
            return False
        returned = [output.name for output in function.signature.output_arg if function.ret[output.name] == argument]
        is_body = operation == "While" and function is functions[-1]
        if returned != ([function.signature.output_arg[number].name] if is_body else []):
            return False
    if operation == "While":
        return not reads_of(functions[0], number) and not (_may_be_polled(variable) and number in _deciding(*functions))
    is_small = variable.shape.num_elements() * variable.dtype.size <= MAX_PACKED_BYTES
    return operation not in ("If", "Case") or is_small


def _may_be_polled(variable: tf.TensorSpec) -> bool:
    return variable.shape.rank == 0 or not variable.dtype.is_floating


def _deciding(condition: Any, body: Any) -> set[int]:
    """Returns the numbers of the arguments on which it depends when a loop ends."""
    found: set[int] = set()
    new = _needed(condition, condition.ret.values())
    while new:
        found |= new
        new = _needed(body, [body.ret[body.signature.output_arg[number].name] for number in new]) - found
    return found


def _needed(function: Any, outputs: Iterable[str]) -> set[int]:
    """Returns the numbers of the arguments from which outputs of a function are computed."""
    nodes = {node.name: node for node in function.node_def}
    waiting, seen = list(outputs), set()
    while waiting:
        name = waiting.pop().partition(":")[0]
        if name not in seen:
            seen.add(name)
            waiting += [each for each in getattr(nodes.get(name), "input", ()) if not each.startswith("^")]
    return {number for number, argument in enumerate(function.signature.input_arg) if argument.name in seen}
