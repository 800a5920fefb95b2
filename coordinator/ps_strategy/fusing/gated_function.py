"""Functions with a gate: with a closed one a worker prepares the function, and the function changes nothing.

    go, x, captures        go: a scalar on the worker. If it is False, the gate fails;
      |                    what has effects, and what takes elements of datasets, runs after the gate.
    gate ──► IteratorGetNext ──► AssignAdd

A worker prepares a function (places, optimizes and divides its graph) when it first runs the function, which takes from
tenths of a second to many seconds. With the gate closed it does so before a closure needs the function.
"""

import graphlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.compilation import add_control_input, built_function
from coordinator.ps_strategy.tensorflow_internals.data_order import functions_of, has_effects, takes_elements

# What the gate says if it is closed, for the servers' logs.
_CLOSED = "coordinator: this call prepares a function and does nothing else; this is no error"
_GATE = "coordinator_gate"


def gated_function(
    body: Callable[..., Any], signature: Sequence[tf.TensorSpec], change: Callable[[Any], object]
) -> Any:
    """Builds a concrete function whose last input opens its gate; see `built_function`.

    Args:
      body: takes a symbolic tensor for each of `signature`, and returns a list of tensors.
      signature: the inputs of the function, without the one that is added.
      change: called with the graph.
    """

    def gated_body(*given: Any) -> Any:
        *inputs, go = given
        # Its messages say why a call fails on a worker whose functions run on a GPU, too.
        with tf.device("/device:CPU:0"):
            tf.raw_ops.Assert(condition=go, data=[_CLOSED], summarize=1, name=_GATE)
        return body(*inputs)

    def gate_and_change(graph: Any) -> None:
        _gate_effects(graph)
        change(graph)

    gated_body.__name__ = body.__name__
    return built_function(gated_body, [*signature, tf.TensorSpec([], tf.bool)], gate_and_change)


def _gate_effects(graph: Any) -> None:
    """Has the operations run after the gate that change something or take elements, unless they do already."""
    operations = {operation.name: operation for operation in graph.get_operations()}
    gate = operations[_GATE]
    needed = {
        name: [tensor.op.name for tensor in each.inputs] + [other.name for other in each.control_inputs]
        for name, each in operations.items()
    }
    after = {_GATE}
    # Not the graph's own order, in which an operation may depend on a later one by a control dependency.
    for name in graphlib.TopologicalSorter(needed).static_order():
        operation = operations[name]
        is_after = not after.isdisjoint(needed[name])
        # Of a call TensorFlow may begin operations before it has all arguments, but not before control edges.
        is_gated = operation is not gate and (has_effects(operation) or takes_elements(operation))
        if is_gated and (not is_after or functions_of(operation)):
            # A control edge to another server is a message. What comes from the worker anyway waits for the gate there.
            add_control_input(_source_on_worker(operation) or operation, gate)
            is_after = True
        if is_after:
            after.add(name)


def _source_on_worker(operation: Any) -> Any:
    """Returns an operation on the worker whose output one on a parameter server waits for; None if there is none."""
    if _is_on_worker(operation):
        return None
    seen, waiting = {operation.name}, [operation]
    while waiting:
        for tensor in waiting.pop().inputs:
            source = tensor.op
            if source.name in seen or tensor.dtype == tf.resource or source.type in ("Const", "Placeholder"):
                continue
            if _is_on_worker(source):
                return source
            seen.add(source.name)
            waiting.append(source)
    return None


def _is_on_worker(operation: Any) -> bool:
    """Returns whether an operation is on the worker: it has no other device, and no handle that may have one."""
    if any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return False
    is_by_itself = operation.colocation_groups() == [f"loc:@{operation.name}".encode()]
    return is_by_itself and tf.DeviceSpec.from_string(operation.device).job in (None, "worker")
