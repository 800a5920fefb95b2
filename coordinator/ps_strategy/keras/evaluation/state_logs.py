"""The logs of a step that depend on the state of metrics after it and on nothing else, such as a metric's result.

Each shard of an evaluation has such a log of its own batches. That of all batches is computed from the state of all:

    batch, state before --> the step --> state after --> result() --> log
                                              '-- replaced by the state of all shards
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

# What a function is given: batches, states, and variables of other functions.
_GIVEN = "Placeholder"


class StateLogs:
    """Computes those logs of a step that depend on the state of metrics only.

    Args:
      graph: of the step.
      after: the tensors of the state after the step, in this graph.
      logs: what the step has logged, by name.
    """

    def __init__(self, graph: Any, after: Sequence[Any], logs: Mapping[str, Any]) -> None:
        self._after = [each.name for each in after]
        self._logs: dict[str, str] = {}
        operations: set[str] = set()
        for name, log in logs.items():
            found = _between(log, set(self._after)) if tf.is_tensor(log) and hasattr(log, "op") else None
            if found is not None:
                self._logs[name] = log.name
                operations |= found
        self._definition = _part_of(graph, operations) if operations else None
        # Of a method that is traced for several objects, TensorFlow warns that it is traced too often.
        self._compute = tf.function(functools.partial(self._imported), autograph=False)

    def values(self, state: Sequence[Any]) -> dict[str, Any]:
        """Returns these logs by name, as NumPy values.

        Args:
          state: what the metrics' variables hold after all shards.
        """
        if not self._logs:
            return {}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            return {name: value.numpy() for name, value in self._compute(list(state)).items()}

    def _imported(self, state: Sequence[Any]) -> dict[str, Any]:
        given = dict(zip(self._after, state, strict=True))
        computed = [name for name in self._logs.values() if name not in given]
        if self._definition is not None:
            used = {each if ":" in each else f"{each}:0" for node in self._definition.node for each in node.input}
            inputs = {name: value for name, value in given.items() if name in used}
            found = tf.graph_util.import_graph_def(self._definition, inputs, computed, name="")
            given.update(zip(computed, found, strict=True))
        return {name: tf.identity(given[tensor]) for name, tensor in self._logs.items()}


def _between(log: Any, after: set[str]) -> set[str] | None:
    """Returns the names of the operations that compute a log from the state after a step; None if it needs more."""
    operations: set[str] = set()
    tensors = [log]
    while tensors:
        tensor = tensors.pop()
        if tensor.name in after or tensor.op.name in operations:
            continue
        if tensor.op.type.startswith(_GIVEN):
            return None
        operations.add(tensor.op.name)
        tensors.extend(tensor.op.inputs)
    return operations


def _part_of(graph: Any, operations: set[str]) -> Any:
    """Returns the definition of some operations of a graph, which can run anywhere and wait for nothing else."""
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in operations]
    del definition.node[:]
    for node in nodes:
        kept = [each for each in node.input if not each.startswith("^")]
        del node.input[:]
        node.input.extend(kept)
        node.device = ""
    definition.node.extend(nodes)
    return definition
