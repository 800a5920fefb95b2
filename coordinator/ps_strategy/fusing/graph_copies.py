"""Builds functions of copies of a traced function's graph, with packed messages and a gate.

The graph is copied and not called several times, because a call starts only when the previous call has ended on all
servers, which takes messages between the servers. Copies are ordered like the iterations of a loop: only operations
that use the same variable, dataset or other resource run one after the other.

A worker prepares a function (places, optimizes and divides its graph) when it first runs the function, which takes from
tenths of a second to many seconds. A call with a closed gate changes nothing. By this call, the worker prepares the
function before a closure needs it:

    go, x, captures        go: a scalar on the worker. If it is False, the gate fails. Operations
      |                    that have effects, or take elements of datasets, run after the gate.
    gate ──► IteratorGetNext ──► AssignAdd
"""

import graphlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing import hoisted_reads
from coordinator.ps_strategy.fusing.message_packing import needed_by, pack_transfers
from coordinator.ps_strategy.tensorflow_internals.datasets import functions_of, has_effects, takes_elements
from coordinator.ps_strategy.tensorflow_internals.functions import (
    add_control_input,
    built_function,
    called_functions,
    called_in,
    captured_inputs,
    copied,
    is_stateful,
    renamed_by_content,
)
from coordinator.ps_strategy.tensorflow_internals.handles import copy_handle_data, is_server_handle, variable_spec

# The message of a closed gate, for the servers' logs.
_CLOSED = "coordinator: this call prepares a function and does nothing else; this is no error"
_GATE = "coordinator_gate"
# A build with packed messages takes about as long as a trace, and each worker has to load one more function. This pays
# only for functions with many calls.
_CALLS_BEFORE_PACKING = 16
# A loop that reads variables in each iteration is slow from the first call, but a function that is called only once is
# not worth building again.
_CALLS_BEFORE_HOISTING = 2
# The names of inputs. No operation of a traced function has such a name.
_INPUT_NAME = "coordinator_input_{}"
# Seeds this far apart give independent numbers.
_BETWEEN_SEEDS = 0x9E3779B1
_SEEDS = 2**31


def gated_function(
    body: Callable[..., Any], signature: Sequence[tf.TensorSpec], change: Callable[[Any], object]
) -> Any:
    """Builds a concrete function like `built_function`. An additional last input opens the function's gate."""

    def gated_body(*arguments: Any) -> Any:
        *inputs, go = arguments
        # The gate is on the CPU. On a GPU, its errors would not contain the message.
        with tf.device("/device:CPU:0"):
            tf.raw_ops.Assert(condition=go, data=[_CLOSED], summarize=1, name=_GATE)
        return body(*inputs)

    def gate_and_change(graph: Any) -> None:
        _gate_effects(graph)
        change(graph)

    gated_body.__name__ = body.__name__
    return built_function(gated_body, [*signature, tf.TensorSpec([], tf.bool)], gate_and_change)


def _gate_effects(graph: Any) -> None:
    """Makes operations that have effects or take elements run after the gate."""
    operations = {operation.name: operation for operation in graph.get_operations()}
    gate = operations[_GATE]
    needed = {name: needed_by(operation) for name, operation in operations.items()}
    after = {_GATE}
    # The graph's own order is not topological: an operation may come before its control dependencies.
    for name in graphlib.TopologicalSorter(needed).static_order():
        operation = operations[name]
        is_after = not after.isdisjoint(needed[name])
        # TensorFlow may begin a called function before all arguments are computed, but not before its control inputs.
        is_gated = operation is not gate and (has_effects(operation) or takes_elements(operation))
        if is_gated and (not is_after or functions_of(operation)):
            # A control edge to another server costs a message. If an operation on the worker sends a tensor to that
            # server, this operation waits for the gate instead.
            add_control_input(_source_on_worker(operation) or operation, gate)
            is_after = True
        if is_after:
            after.add(name)


def _source_on_worker(operation: Any) -> Any:
    """Returns an operation on the worker from which an operation on a parameter server gets an input, or None."""
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
    """Returns whether an operation is on the worker: it has no other device, and takes no handle of a resource."""
    if any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return False
    is_by_itself = operation.colocation_groups() == [f"loc:@{operation.name}".encode()]
    return is_by_itself and tf.DeviceSpec.from_string(operation.device).job in (None, "worker")


class GraphCopies:
    """Adds copies of a concrete function, `count` in all, to the graph of another function with equal inputs.

    Operations that draw random numbers from a seed get another seed in each copy, and for each `count`; otherwise all
    copies would draw the same numbers. If such an operation is in a loop, a branch or a called function, each copy gets
    its own version of that function.

    Attributes:
      hoists: whether a copy reads some variables once that the function reads in loops, branches or calls.
    """

    def __init__(self, concrete: Any, count: int) -> None:
        self._concrete = concrete
        self._servers = servers_of_resources(concrete)
        self._inputs = [tensor.name for tensor in concrete.inputs]
        self._outputs = [tensor.name for tensor in concrete.outputs]
        self._shapes = [tensor.shape for tensor in concrete.outputs]
        definition = concrete.graph.as_graph_def()
        variables = {tensor.op.name: spec for tensor in concrete.inputs if (spec := variable_spec(tensor)) is not None}
        self.hoists = hoisted_reads.hoist(definition, variables) > 0
        self._definition = _without_inputs(definition, {tensor.op.name for tensor in concrete.inputs}, self._servers)
        # In the function, outputs wait for all changes of variables. In copies, the outer function waits at its end.
        outputs = {tensor.op.name for tensor in concrete.outputs}
        for node in self._definition.node:
            if node.name in outputs and node.op == "Identity":
                del node.input[1:]
        used = {name for node in self._definition.node for name in node.input}
        self._used = {name for name in self._inputs if name.removesuffix(":0") in used}
        self._seeds = _Seeds(self._definition)
        # Counts the copies for smaller counts too, so that no two copies have the same number.
        self._copies = count * (count - 1) // 2

    def note_inputs(self, placeholders: Sequence[Any]) -> None:
        """Copies TensorFlow's handle data from the function's inputs to the placeholders that replace them."""
        for placeholder, original in zip(placeholders, self._concrete.inputs, strict=True):
            copy_handle_data(original, placeholder)

    def add(self, inputs: Sequence[Any], name: str) -> list[Any]:
        """Adds a copy, and returns its flat outputs.

        `inputs` includes captures. `name` is a unique scope for the operations' names; empty to keep their names.
        """
        self._copies += 1
        self._seeds.set(self._definition, self._copies * _BETWEEN_SEEDS)
        passed = dict(zip(self._inputs, inputs, strict=True))
        used = {name: tensor for name, tensor in passed.items() if name in self._used}
        wanted = [output for output in self._outputs if output not in passed]
        computed = iter(tf.graph_util.import_graph_def(self._definition, used, wanted, name))
        self._definition.ClearField("library")
        outputs = [passed[output] if output in passed else next(computed) for output in self._outputs]
        for output, shape in zip(outputs, self._shapes, strict=True):
            output.set_shape(shape)
        return outputs

    def pack_transfers(self, graph: Any, names: Sequence[str] = ()) -> int:
        """Packs the messages of the copies in a graph that begins with the function's inputs.

        `names` are the names of the copies, in order, if there are several; see `message_packing.pack_transfers`.
        """
        devices = {
            placeholder.op.name: self._servers[original.op.name]
            for placeholder, original in zip(graph.inputs, self._concrete.inputs, strict=False)
            if original.op.name in self._servers
        }
        return pack_transfers(graph, devices, names)


def calls_before_packing(concrete: Any) -> float:
    """Returns after how many calls of a function a copy of its graph is worth building.

    The copy has packed messages, or reads the variables of loops in advance. The copy has the same effects and results,
    but draws other random numbers. The number is infinite if the function uses one resource: no messages can be packed.
    """
    if hoisted_reads.has_loops(concrete):
        return _CALLS_BEFORE_HOISTING
    return _CALLS_BEFORE_PACKING if len(servers_of_resources(concrete)) > 1 else math.inf


def packed_function(concrete: Any) -> Any:
    """Builds an equal function with fewer messages and the same operation names; returns None if nothing changes.

    The function has a gate, see `gated_function`.
    """
    copies = GraphCopies(concrete, 1)
    messages = []

    def packed_body(*inputs: Any) -> list[Any]:
        copies.note_inputs(inputs)
        return copies.add(inputs, "")

    signature = [
        tf.TensorSpec(tensor.shape, tensor.dtype, _INPUT_NAME.format(number))
        for number, tensor in enumerate(concrete.inputs)
    ]
    built = gated_function(packed_body, signature, lambda graph: messages.append(copies.pack_transfers(graph)))
    return built if any(messages) or copies.hoists else None


def servers_of_resources(concrete: Any) -> dict[str, str]:
    """Returns the devices of captured resources on parameter servers, by the names of the function's inputs."""
    captured = captured_inputs(concrete)
    symbolic = concrete.inputs[len(concrete.inputs) - len(captured) :]
    return {
        tensor.op.name: capture.device
        for tensor, capture in zip(symbolic, captured, strict=True)
        if is_server_handle(capture)
    }


def _without_inputs(definition: Any, inputs: set[str], devices: Mapping[str, str]) -> Any:
    kept = [node for node in definition.node if node.name not in inputs]
    for node in kept:
        node.input[:] = [name for name in node.input if not (name.startswith("^") and name[1:] in inputs)]
        together = [group.decode().removeprefix("loc:@") for group in node.attr["_class"].list.s]
        node.device = node.device or next((devices[name] for name in together if name in devices), "")
        del node.attr["_class"]
        if elsewhere := [f"loc:@{name}".encode() for name in together if name not in inputs]:
            node.attr["_class"].list.s.extend(elsewhere)
    return type(definition)(versions=definition.versions, library=definition.library, node=kept)


class _Seeds:
    """The seeds of the operations of a `GraphDef`, and of the functions in its library.

    Functions that draw from a seed, and their callers, are removed from the library; `set` adds them with new seeds.
    """

    def __init__(self, definition: Any) -> None:
        functions = {function.signature.name: function for function in definition.library.function}
        drawing = {name for name, function in functions.items() if any(map(_seed_of, function.node_def))}
        callers = {
            name: {called for node in function.node_def for _, called in called_functions(node)}
            for name, function in functions.items()
        }
        while more := {name for name, called in callers.items() if called & drawing} - drawing:
            drawing |= more
        self._functions = {name: copied(functions[name]) for name in drawing}
        others = [copied(function) for name, function in functions.items() if name not in drawing]
        del definition.library.function[:]
        definition.library.function.extend(others)
        self._nodes = [(node, seed) for node in definition.node if (seed := _seed_of(node))]
        calls = (function for node in definition.node for function in called_in(node))
        self._calls = [(function, function.name) for function in calls if function.name in drawing]

    def set(self, definition: Any, offset: int) -> None:
        """Adds a number to each seed; adds functions with the new seeds under other names."""
        for node, (attribute, seed) in self._nodes:
            node.attr[attribute].i = (seed + offset) % _SEEDS
        names: dict[str, str] = {}
        for function, name in self._calls:
            function.name = self._named(name, offset, names, definition.library)

    def _named(self, name: str, offset: int, names: dict[str, str], library: Any) -> str:
        """Returns the name of a function with the new seeds; adds the function to a library if not in `names`."""
        if name not in names:
            function = copied(self._functions[name])
            for node in function.node_def:
                if seed := _seed_of(node):
                    node.attr[seed[0]].i = (seed[1] + offset) % _SEEDS
                for called in called_in(node):
                    if called.name in self._functions:
                        called.name = self._named(called.name, offset, names, library)
            names[name] = renamed_by_content(function)
            library.function.append(function)
        return names[name]


def _seed_of(node: Any) -> tuple[str, int] | None:
    """Returns the attribute that must differ in each copy, and its value; None if the node draws from no seed.

    If all seeds of an operation are 0, it draws a new seed whenever a worker prepares it. A stateless operation draws
    the same numbers in each call.
    """
    seeds = [name for name in ("seed2", "seed", "file_random_seed") if name in node.attr]
    is_drawing = any(node.attr[name].i for name in seeds) and is_stateful(node)
    return (seeds[0], node.attr[seeds[0]].i) if is_drawing else None
