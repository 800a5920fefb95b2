"""Copies of a traced function's graph, one behind the other in another graph.

Not calls of the function: a call begins when all of the one before has ended, on all servers, and tells so from server
to server. Copies are ordered as the operations of a loop in one function are: those that use the same variable, dataset
or other resource, in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.compiled_functions import is_on_parameter_server
from coordinator.ps_strategy.fusing.message_packing import pack_transfers

# Far from each other, so that copies draw numbers of their own.
_BETWEEN_SEEDS = 0x9E3779B1
_SEEDS = 2**31


class StepCopies:
    """Adds copies of a function to the graph of another one, which takes the same inputs.

    Operations that draw random numbers from a seed have another one in each copy; they would all draw the same.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      count: how many copies there will be. Those of which there are more or fewer draw other numbers, too.
    """

    def __init__(self, concrete: Any, count: int) -> None:
        self._concrete = concrete
        self._servers = servers_of_resources(concrete)
        self._inputs = [tensor.name for tensor in concrete.inputs]
        self._outputs = [tensor.name for tensor in concrete.outputs]
        self._shapes = [tensor.shape for tensor in concrete.outputs]
        self._definition = _without_inputs(
            concrete.graph.as_graph_def(), {tensor.op.name for tensor in concrete.inputs}, self._servers
        )
        # Outputs wait for all that the function does to variables; what runs the copies waits for that at their end.
        _let_go(self._definition, {tensor.op.name for tensor in concrete.outputs})
        used = {name for node in self._definition.node for name in node.input}
        self._used = {name for name in self._inputs if name.removesuffix(":0") in used}
        # Each with its own seed.
        self._seeded = [(node, node.attr["seed2"].i) for node in self._definition.node if _is_seeded(node)]
        # So far, and those of all smaller counts.
        self._copies = count * (count - 1) // 2

    def note_inputs(self, given: Sequence[Any]) -> None:
        """Tells TensorFlow what is known of the function's inputs of some symbolic tensors that stand for them."""
        for placeholder, original in zip(given, self._concrete.inputs, strict=True):
            tensorflow_internals.copy_handle_data(original, placeholder)

    def add(self, inputs: Sequence[Any], name: str) -> list[Any]:
        """Adds one more.

        Args:
          inputs: one symbolic tensor for each of the function's, in place of its captures too.
          name: of the copy, another for each: the scope of its operations. Without one they are named as they are.

        Returns:
          Its flat outputs.
        """
        self._copies += 1
        for node, seed in self._seeded:
            node.attr["seed2"].i = (seed + self._copies * _BETWEEN_SEEDS) % _SEEDS
        given = dict(zip(self._inputs, inputs, strict=True))
        found = tf.graph_util.import_graph_def(
            self._definition,
            {name: tensor for name, tensor in given.items() if name in self._used},
            [output for output in self._outputs if output not in given],
            name,
        )
        # The functions that it calls are there now.
        self._definition.ClearField("library")
        rest = iter(found)
        outputs = [given[output] if output in given else next(rest) for output in self._outputs]
        for output, shape in zip(outputs, self._shapes, strict=True):
            output.set_shape(shape)
        return outputs

    def pack_transfers(self, graph: Any, names: Sequence[str] = ()) -> int:
        """See `packed_transfers.pack_transfers`.

        Args:
          graph: that the copies were added to; its inputs stand for the function's.
          names: of the copies, if there are several, in their order.
        """
        devices = {
            placeholder.op.name: self._servers[original.op.name]
            for placeholder, original in zip(graph.inputs, self._concrete.inputs, strict=True)
            if original.op.name in self._servers
        }
        return pack_transfers(graph, devices, names)


def servers_of_resources(concrete: Any) -> dict[str, str]:
    """The devices of captured resources on parameter servers, by the names of the inputs that stand for them."""
    captured = concrete.captured_inputs
    symbolic = concrete.inputs[len(concrete.inputs) - len(captured) :]
    return {
        tensor.op.name: capture.device
        for tensor, capture in zip(symbolic, captured, strict=True)
        if is_on_parameter_server(capture)
    }


def _without_inputs(definition: Any, inputs: set[str], devices: Mapping[str, str]) -> Any:
    """Takes the nodes away that stand for what is given; it is there before anything runs."""
    kept = [node for node in definition.node if node.name not in inputs]
    for node in kept:
        needed = [name for name in node.input if not (name.startswith("^") and name[1:] in inputs)]
        del node.input[:]
        node.input.extend(needed)
        together = [group.decode().removeprefix("loc:@") for group in node.attr["_class"].list.s]
        node.device = node.device or next((devices[name] for name in together if name in devices), "")
        del node.attr["_class"]
        if elsewhere := [f"loc:@{name}".encode() for name in together if name not in inputs]:
            node.attr["_class"].list.s.extend(elsewhere)
    rest = type(definition)(versions=definition.versions, library=definition.library)
    rest.node.extend(kept)
    return rest


def _let_go(definition: Any, outputs: set[str]) -> None:
    """Has outputs wait for nothing but their values."""
    for node in definition.node:
        if node.name in outputs and node.op == "Identity":
            del node.input[1:]


def _is_seeded(node: Any) -> bool:
    return {"seed", "seed2"} <= set(node.attr) and bool(node.attr["seed"].i or node.attr["seed2"].i)
