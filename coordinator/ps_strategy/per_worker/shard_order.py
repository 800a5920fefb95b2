"""Whether a dataset function takes every n-th element of data whose order is random, and so another one on each worker.

Then some elements are read twice and others by no worker, without an error. `Dataset.list_files` shuffles unless it is
told otherwise. What is random is decided by the graph: a shuffle without a seed has the seeds 0 and 0 there, unless
`tf.random.set_seed` was called.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.compilation import called_functions, passed_inputs

_logger = logging.getLogger("coordinator")

# The places of the two seeds among the inputs of operations, by the beginning of their names.
_SEED_INPUTS = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
# What these draw for an element changes its value, not the order.
_MAPS = ("Map", "ParallelMap")


def warn_of_random_order(name: str, concrete: Any) -> None:
    """Logs a warning if a traced dataset function, called `name`, takes shards of data in a random order."""
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    if _Nodes(graph.node, functions).have_random_shard():
        _logger.warning(
            "The dataset function %r takes a shard of data in a random order: a shuffle without a seed comes before "
            "shard(), so that each worker divides another order. Together they read some elements twice and others "
            "never. Shuffle after shard(), or in the same order everywhere: list_files(..., shuffle=False), "
            "shuffle(n, seed=17).",
            name,
        )


class _Nodes:
    """The operations of one graph.

    Args:
      nodes: each a `tf.compat.v1.NodeDef`.
      functions: each a `FunctionDef`, by name.
      random: the names of arguments that are datasets in a random order.
    """

    def __init__(self, nodes: Sequence[Any], functions: Mapping[str, Any], random: Collection[str] = ()) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._functions = functions
        self._random = random

    def have_random_shard(self) -> bool:
        """Returns whether a dataset in a random order is divided here, or in a function that is called."""
        return any(
            (node.op == "ShardDataset" and self._constant(node.input[1]) != 1 and self._is_random(node.input[0]))
            or any(inner.have_random_shard() for inner in self._called_by(node))
            for node in self._nodes.values()
        )

    def _called_by(self, node: Any) -> Iterator["_Nodes"]:
        for role, name in called_functions(node):
            if (function := self._functions.get(name)) is not None:
                passed = passed_inputs(node, role, function)
                random = {argument for argument, outer in passed if self._is_random(outer)}
                yield _Nodes(function.node_def, self._functions, random)

    def _is_random(self, tensor: str) -> bool:
        """Returns whether something random has an effect on the order of a dataset, given by the name of its tensor."""
        wanted, seen = [tensor], set()
        while wanted:
            name = wanted.pop().partition(":")[0]
            node = self._nodes.get(name)
            if name in self._random or (node is not None and self._draws_order(node)):
                return True
            if node is not None and name not in seen:
                seen.add(name)
                wanted += [each for each in node.input if not each.startswith("^")]
        return False

    def _draws_order(self, node: Any) -> bool:
        """Returns whether an operation has a random effect on the order of a dataset."""
        for begin, place in _SEED_INPUTS.items():
            if node.op.startswith(begin):
                return [self._constant(each) for each in node.input[place : place + 2]] == [0, 0]
        if _draws_value(node) or ("deterministic" in node.attr and node.attr["deterministic"].s == b"false"):
            return True
        is_map = node.op.startswith(_MAPS)
        return any(inner.draw_order(except_values=is_map) for inner in self._called_by(node))

    def draw_order(self, *, except_values: bool) -> bool:
        """Returns whether any operation has such an effect, but for those that draw the value of an element."""
        return any(
            self._draws_order(node) for node in self._nodes.values() if not (except_values and _draws_value(node))
        )

    def _constant(self, tensor: str) -> int | None:
        node = self._nodes.get(tensor.partition(":")[0])
        return int(tf.make_ndarray(node.attr["value"].tensor)) if node is not None and node.op == "Const" else None


def _draws_value(node: Any) -> bool:
    """Returns whether an operation draws random values without a seed."""
    return [node.attr[name].i for name in ("seed", "seed2") if name in node.attr] == [0, 0]
