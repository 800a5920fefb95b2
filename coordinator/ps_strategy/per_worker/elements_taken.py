"""How many elements a function takes from the iterators among its arguments, as far as its graph says."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.calls import captured_inputs
from coordinator.ps_strategy.tensorflow_internals.compilation import called_functions, passed_inputs

_TAKING = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})
# Operations that call their function once.
_CALLING = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# In the names of other operations that use an iterator, or return it.
_UNKNOWN = ("Iterator", "Identity", "Switch", "Merge")


def elements_per_call(concrete: Any) -> float:
    """Returns how many elements a call takes at most from each iterator among its arguments.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.

    Returns:
      The number; infinite if it is not known, because elements are taken in a loop or a branch.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    arguments = concrete.inputs[: len(concrete.inputs) - len(captured_inputs(concrete))]
    handles = [argument.op.name for argument in arguments if argument.dtype == tf.resource]
    return max((_taken(handle, graph.node, functions) for handle in handles), default=0)


def _taken(handle: str, nodes: Sequence[Any], functions: Mapping[str, Any]) -> float:
    """Returns how many elements the nodes of one graph take from an iterator, by its name there."""
    return sum(_taken_by(node, handle, functions) for node in nodes if handle in node.input)


def _taken_by(node: Any, handle: str, functions: Mapping[str, Any]) -> float:
    if node.op in _TAKING:
        return 1
    count: float = math.inf if any(part in node.op for part in _UNKNOWN) else 0
    for role, name in called_functions(node):
        passed = [inner for inner, outer in passed_inputs(node, role, functions[name]) if outer == handle]
        inside = sum(_taken(inner, functions[name].node_def, functions) for inner in passed)
        count += inside if passed and (node.op in _CALLING or not inside) else math.inf
    return count
