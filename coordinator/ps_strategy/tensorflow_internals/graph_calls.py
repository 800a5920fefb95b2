"""Changes to TensorFlow for the client's functions that call Python: values of each call, order, errors, loops.

A *barrier* is an operation that takes the values of its call (`call_time_values`), directly or in a loop, a branch or
another function that it calls. Operations with effects run before a barrier if they were created before it, otherwise
after the barrier. TensorFlow itself orders only operations that share a resource.
"""

import contextlib
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.autograph.utils import misc
from tensorflow.python.framework import error_interpolation
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.tensorflow_internals.datasets import dependencies_added
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

_ORDER = "coordinator_order_of_barriers"


def call_time_values(make: Callable[[], Sequence[Any]], specs: Sequence[tf.TensorSpec], key: Hashable) -> Any:
    """Returns tensors of the function that is being traced; their values are made at each call of the function.

    `make` is called on the caller's thread at each call; it returns a tensor for each of `specs`. Equal keys give the
    same tensors, also in functions that call each other.
    """
    # Private: publicly, a call has only values that the caller passes.
    graph = _function_of(tf.compat.v1.get_default_graph())
    captures = graph._function_captures
    if key not in captures.by_ref_internal:
        graph.capture_call_time_value(make, list(specs), key=key)

        def values() -> Sequence[Any]:
            # TensorFlow would look up the values in the graph of a loop's body, to which no values are passed.
            return make() if tf.executing_eagerly() else call_time_values(make, specs, key)

        values.output_spec = captures.by_ref_external[key].output_spec  # type: ignore[attr-defined]
        captures.by_ref_external[key] = values
    return captures.by_ref_internal[key]


def python_operation(function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Adds an operation that calls Python, like `tf.numpy_function`, to the function that is being traced.

    The Python function lives as long as the graph of the traced function.
    """
    outputs = tf.numpy_function(function, inputs, types)
    graph = holder = tf.compat.v1.get_default_graph()
    registered = function.ag_dnc_wrapper__  # type: ignore[attr-defined]  # TensorFlow sets it
    # Private: TensorFlow stores the Python function in the outermost graph, which lives as long as the process. Nightly
    # builds store it in the function's graph, as is done here.
    while registered not in getattr(holder, "_py_funcs_used_in_graph", ()):
        holder = holder.outer_graph
    holder._py_funcs_used_in_graph.remove(registered)
    graph._py_funcs_used_in_graph = [*getattr(graph, "_py_funcs_used_in_graph", ()), registered]
    return [] if not types else list(outputs)


def _function_of(graph: Any) -> Any:
    """Returns the graph of the function that contains the body of a loop or a branch."""
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def _values_in(graph: Any, key: Hashable) -> set[int]:
    if not isinstance(graph, FuncGraph):
        return set()
    if not isinstance(graph, ControlFlowFuncGraph):
        return {id(tensor) for tensor in graph._function_captures.by_ref_internal.get(key, ())}
    outer = _values_in(graph.outer_graph, key)
    return {id(inner) for captured, inner in graph.captures if id(captured) in outer} | outer if outer else outer


class _OrderInGraph:
    """The order of the operations of one graph. `values` has the `id` of each of the call's values in the graph."""

    def __init__(self, values: set[int]) -> None:
        self._values = values
        self._barrier: Any = None
        self._since: list[Any] = []

    def add(self, operation: Any) -> None:
        """Adds the operation that was created next."""
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


def barriers_in_order(key: Hashable) -> contextlib.AbstractContextManager[None]:
    """A scope in which functions are traced so that the barriers of `key` run in order."""
    graphs: OwnedValues[_OrderInGraph | None] = OwnedValues()

    def add(operation: Any) -> None:
        graph = operation.graph
        if graph not in graphs:
            values = _values_in(graph, key)
            graphs[graph] = _OrderInGraph(values) if values else None
        if (order := graphs[graph]) is not None:
            order.add(operation)

    return dependencies_added(_ORDER, add)


@contextlib.contextmanager
def errors_raised_as(original: Callable[[str], BaseException | None]) -> Iterator[None]:
    """A scope in which TensorFlow raises another error in place of an error that it has made from a Python error.

    `original` takes the message of TensorFlow's error. It returns the error to raise, or None for TensorFlow's error.
    """
    # Private: TensorFlow keeps only the text of an error that Python code in a graph raises, and has no public hook for
    # it. TensorFlow calls `parse_message` on the caller's thread for each error of a function, and at no other time.
    parse = error_interpolation.parse_message

    def parse_message(message: str) -> Any:
        error = original(message)
        if error is None:
            return parse(message)
        try:
            raise error from error.__cause__
        finally:
            # The traceback refers to this frame: without `del`, error and call would live until a garbage collection.
            del error

    with attribute_replaced(error_interpolation, "parse_message", parse_message):
        yield


def _only_call(body: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]] | None:
    """Returns the only call in the body of a loop; None if the body does more, or uses the number of the iteration."""
    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))
    if "ag__" not in cells:
        return None
    calls: list[tuple[Any, Sequence[Any], Mapping[str, Any]]] = []

    def converted_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *_: Any) -> None:
        calls.append((function, args, kwargs or {}))

    # This stand-in for AutoGraph records the calls in the body, and does not make them.
    autograph = types.SimpleNamespace(ld=cells["ag__"].cell_contents.ld, converted_call=converted_call)
    cells["ag__"], number = types.CellType(autograph), object()
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    try:
        types.FunctionType(body.__code__, body.__globals__, closure=tuple(cells.values()))(number)
    except Exception:  # noqa: BLE001 - the body needs a result, a branch or the like; a user's error comes again
        return None
    is_same = not any(leaf is number for leaf in tf.nest.flatten([call[1:] for call in calls]))
    # If the loop computes an argument, the argument may differ between iterations, because a variable may change.
    return calls[0] if len(calls) == 1 and is_same and len(graph.get_operations()) == before else None


@contextlib.contextmanager
def plain_loops_as(replace: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], bool]) -> Iterator[None]:
    """A scope in which a loop over `tf.range` may be replaced if each iteration makes only the same call.

    `replace` takes the called function, its positional and keyword arguments, and the number of iterations, a scalar.
    It adds operations in place of the loop, or returns False to keep the loop.
    """
    # Private: AutoGraph calls this function for loops over `tf.range`. Its public hook is only for types of objects.
    loop = control_flow._tf_range_for_stmt

    def range_loop(iterated: Any, extra_test: Any, body: Any, *state: Any) -> None:
        *_, symbols, _ = state
        call = None if symbols or extra_test is not None else _only_call(body)
        if call is None or not replace(*call, misc.get_range_len(*iterated.op.inputs)):
            loop(iterated, extra_test, body, *state)

    with attribute_replaced(control_flow, "_tf_range_for_stmt", range_loop):
        yield
