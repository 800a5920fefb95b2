"""What TensorFlow must do for functions on the client that call Python: values of each call, order, errors.

A *barrier* is an operation that takes the values of its call (`call_time_values`), or contains one that does: a loop, a
branch, a call of another function. All operations with effects that were created before a barrier run before it, and
all that were created after it run after it. TensorFlow by itself orders operations that share a resource alone.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, error_interpolation
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# Under this name the order of barriers is registered with TensorFlow.
_ORDER = "coordinator_order_of_barriers"


def call_time_values(make: Callable[[], Sequence[Any]], specs: Sequence[tf.TensorSpec], key: Hashable) -> Any:
    """Returns tensors of the function that is being traced, whose values are made when it is called.

    Args:
      make: called on the caller's thread at each call; returns a tensor for each of `specs`.
      specs: the types of the tensors.
      key: calls with the same one return the same tensors, in functions that call each other, too.
    """
    # Private: there is no public way to pass a value of the call that the caller does not pass.
    graph = _function_of(tf.compat.v1.get_default_graph())
    captures = graph._function_captures
    if key not in captures.by_ref_internal:
        graph.capture_call_time_value(make, list(specs), key=key)

        def values() -> Sequence[Any]:
            # TensorFlow would look for the values in the body of a loop, to which nothing is passed.
            return make() if tf.executing_eagerly() else call_time_values(make, specs, key)

        values.output_spec = captures.by_ref_external[key].output_spec  # type: ignore[attr-defined]
        captures.by_ref_external[key] = values
    return captures.by_ref_internal[key]


def _function_of(graph: Any) -> Any:
    """Returns the graph of the function in which the body of a loop, or a branch, is."""
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def _values_in(graph: Any, key: Hashable) -> set[int]:
    """Returns the identities of the call's values in a graph."""
    if not isinstance(graph, FuncGraph):
        return set()
    if not isinstance(graph, ControlFlowFuncGraph):
        return {id(tensor) for tensor in graph._function_captures.by_ref_internal.get(key, ())}
    outer = _values_in(graph.outer_graph, key)
    return {id(inner) for captured, inner in graph.captures if id(captured) in outer} | outer if outer else outer


class _OrderInGraph:
    """The order of the operations of one graph.

    Args:
      values: the identities of the values of the call in it.
    """

    def __init__(self, values: set[int]) -> None:
        self._values = values
        self._barrier: Any = None
        self._since: list[Any] = []

    def add(self, operation: Any) -> None:
        """Adds the next operation that was created."""
        is_barrier = any(id(tensor) in self._values for tensor in operation.inputs)
        if not is_barrier and not operation.op_def.is_stateful:
            return
        if self._barrier is not None:
            operation._add_control_input(self._barrier)
        if is_barrier:
            operation._add_control_inputs(self._since)
            self._barrier, self._since = operation, []
        else:
            self._since.append(operation)


@contextlib.contextmanager
def barriers_in_order(key: Hashable) -> Iterator[None]:
    """A scope in which functions that are traced run the barriers of `key` in order."""
    # Private: automatic control dependencies have no public hook; this one is for kinds of operations.
    graphs: weakref.WeakKeyDictionary[Any, _OrderInGraph | None] = weakref.WeakKeyDictionary()

    def add(operation: Any, reads: Any, writes: Any) -> bool:
        graph = operation.graph
        if graph not in graphs:
            values = _values_in(graph, key)
            graphs[graph] = _OrderInGraph(values) if values else None
        order = graphs[graph]
        if order is not None:
            order.add(operation)
        return False

    resolvers = auto_control_deps._acd_resource_resolvers_registry
    resolvers.register(add, _ORDER)
    try:
        yield
    finally:
        del resolvers._registry[_ORDER]


@contextlib.contextmanager
def errors_raised_as(original: Callable[[str], BaseException | None]) -> Iterator[None]:
    """A scope in which TensorFlow raises another error in place of one that it has made from a Python error.

    Args:
      original: returns the error to raise for the message of TensorFlow's error; None for TensorFlow's.
    """
    # Private: TensorFlow keeps the text of an error that Python code in a graph raises, and no public hook sees it.
    # This is called on the caller's thread for each error of a function, and at no other time.
    parse = error_interpolation.parse_message

    def parse_message(message: str) -> Any:
        error = original(message)
        if error is None:
            return parse(message)
        try:
            raise error from error.__cause__
        finally:
            # A reference from its own traceback would keep it, and the call, until the next garbage collection.
            del error

    with attribute_replaced(error_interpolation, "parse_message", parse_message):
        yield
