"""Graphs that are changed before they become functions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function, function_type_utils
from tensorflow.python.framework import func_graph


def built_function(
    body: Callable[..., Any], signature: Sequence[tf.TensorSpec], change: Callable[[Any], object]
) -> Any:
    """A concrete function of a graph that is changed after it was traced.

    Args:
      body: is traced, as it is; takes a symbolic tensor for each of `signature`, and returns a list of tensors.
      signature: what the function takes.
      change: is given the graph, with all control dependencies in it.

    Returns:
      The function, to be run by `call`.
    """
    # Private: a traced function is registered as it is; nothing public lets its graph be changed before.
    graph = func_graph.func_graph_from_py_func(body.__name__, body, tuple(signature), {})
    change(graph)
    return concrete_function.ConcreteFunction.from_func_graph(
        graph, function_type_utils.derive_from_graph(graph), {}, shared_func_graph=False
    )


def replace_input(operation: tf.Operation, position: int, tensor: tf.Tensor) -> None:
    """Has an operation use another tensor of its graph in a place."""
    # Private: an operation of a graph is for ever, publicly.
    operation._update_input(position, tensor)
