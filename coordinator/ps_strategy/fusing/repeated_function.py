r"""Several calls of one traced function as a single call, which costs one round trip to the worker.

    inputs     [shared]  [one per step, stacked]          captures, including handles
                  |       /        |        \              |
    worker     step 0 --------> step 1 --------> step 2   ordered where they use the same resource
                  \_______________|_______________/
    outputs            joined by type, one transfer each

The steps have the effects of separate calls, in order wherever they use the same variable, dataset or other resource.
Each has its own inputs and results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.fusing.gated_function import gated_function
from coordinator.ps_strategy.fusing.graph_copies import GraphCopies
from coordinator.ps_strategy.fusing.message_packing import PACKED_TYPES
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB

_NAME = "coordinator_fusing_disabled"


def disable_fusing() -> None:
    """Disables fusing for the function that is being traced, and for every function that calls it."""
    tf.no_op(name=_NAME)


def may_be_fused(concrete: Any) -> bool:
    """Returns True if neither a concrete function nor one that it calls has disabled fusing."""
    graph = concrete.graph.as_graph_def()
    inner = (node for function in graph.library.function for node in function.node_def)
    return not any(_NAME in node.name for nodes in (graph.node, inner) for node in nodes)


# Types for which TensorFlow has kernels that stack, join and split. It can send more types than these.
_STACKED = frozenset(
    {
        *PACKED_TYPES,
        *(tf.bool, tf.complex64, tf.complex128, tf.string),
        *(tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn),
    }
)


class RepeatedFunction:
    """`count` calls of a function, one after the other.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      count: number of calls, at least 2.
      is_shared: for each input without captures, True if all calls are given the same tensor.
    """

    def __init__(self, concrete: Any, count: int, is_shared: Sequence[bool]) -> None:
        self._count = count
        captures = len(concrete.inputs) - len(is_shared)
        is_shared = (*is_shared, *[True] * captures)
        self._joined, self._single = _by_transfer(concrete.outputs)
        self._shapes = [output.shape for output in concrete.outputs]
        self.concrete = _build(concrete, count, is_shared, self._joined, self._single)

    def call_on(
        self,
        inputs: Sequence[Any],
        captures: Sequence[Any],
        go: Any,
        run: Callable[[Any, Sequence[Any]], Sequence[Any]],
    ) -> list[Sequence[Any]]:
        """Runs all steps and copies their results to the client.

        Args:
          inputs: the values of `StackedInputs`: tensors, on the client unless they are shared.
          captures: the captures, the same for all steps.
          go: opens the gate of the function; see `gated_function`.
          run: calls a concrete function with its inputs and captures, and returns its flat outputs.

        Returns:
          For each flat output of the function its values in all steps: an array with the steps along its first axis,
          or a list of NumPy values if TensorFlow does not know their shape.
        """
        fetched = [tensor.numpy() for tensor in run(self.concrete, [*inputs, *captures, go])]
        columns: list[Sequence[Any]] = [()] * len(self._shapes)
        for positions, values in zip(self._joined, fetched, strict=False):
            shapes = [self._shapes[position] for position in positions]
            by_step = values.reshape(self._count, sum(shape.num_elements() for shape in shapes))
            start = 0
            for position, shape in zip(positions, shapes, strict=True):
                end = start + shape.num_elements()
                columns[position] = by_step[:, start:end].reshape(self._count, *shape)
                start = end
        rest = fetched[len(self._joined) :]
        for number, position in enumerate(self._single):
            columns[position] = rest[number :: len(self._single)]
        return columns


def _build(
    concrete: Any,
    count: int,
    is_shared: Sequence[bool],
    joined: Sequence[Sequence[int]],
    single: Sequence[int],
) -> Any:
    """Builds the function of all steps. A function, because a closure over `self` would keep it alive."""
    signature = [
        tf.TensorSpec(tensor.shape if is_one else [count, *tensor.shape], tensor.dtype)
        for tensor, is_one in zip(concrete.inputs, is_shared, strict=True)
    ]
    steps = GraphCopies(concrete, count)
    names = [f"step_{step}" for step in range(count)]

    def repeat(*given: Any) -> list[Any]:
        steps.note_inputs(given)
        inputs = [
            [value] * count if is_one else tf.unstack(value, count)
            for value, is_one in zip(given, is_shared, strict=True)
        ]
        outputs = [steps.add([each[step] for each in inputs], name) for step, name in enumerate(names)]
        vectors = [_join([found[position] for found in outputs for position in each]) for each in joined]
        return vectors + [found[position] for found in outputs for position in single]

    return gated_function(repeat, signature, lambda graph: steps.pack_transfers(graph, names))


def _by_transfer(outputs: Sequence[Any]) -> tuple[list[list[int]], list[int]]:
    """Returns the positions of outputs that are joined, by type, and of those that are transferred one by one."""
    joined: dict[tf.DType, list[int]] = {}
    single = []
    for position, output in enumerate(outputs):
        if output.shape.is_fully_defined() and output.dtype in _STACKED:
            joined.setdefault(output.dtype, []).append(position)
        else:
            single.append(position)
    return list(joined.values()), single


def _join(values: Sequence[Any]) -> Any:
    """Returns all elements of all values in one vector."""
    if all(value.shape.rank == 0 for value in values):
        return tf.stack(values)
    return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)


def is_stackable(value: Any) -> bool:
    """Returns True if an input may differ from step to step: numbers or strings on the client."""
    if isinstance(value, tf.Tensor):
        return value.dtype in _STACKED and is_on_client(value.device)
    return isinstance(value, np.ndarray | np.generic | int | float | complex | str | bytes)


@functools.lru_cache(maxsize=1024)
def is_on_client(device: str) -> bool:
    """Returns whether a device is the client's."""
    return bool(tf.DeviceSpec.from_string(device).job == CLIENT_JOB)
