"""Several calls of one traced function as a single call, so that it costs a worker one round trip.

    inputs     [shared]  [one per step, stacked]          captures, handles among them
                  |       /        |        \\              |
    worker     step 0 --------> step 1 --------> step 2   what they share, each uses after the one before
                  \\_______________|_______________/
    outputs            packed, by type: one transfer each

Promises: the steps do what as many calls would; what uses the same variable, dataset or other resource does so in their
order; each has its own inputs and its own results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.fusing.graph_copies import StepCopies
from coordinator.ps_strategy.fusing.message_packing import PACKED_TYPES
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB

# What TensorFlow has kernels for that stack, join and split it. It sends more than these.
_STACKED = frozenset(
    {
        *PACKED_TYPES,
        *(tf.bool, tf.complex64, tf.complex128, tf.string),
        *(tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn),
    }
)

# Runs a concrete function with its inputs, captures among them; gives its outputs.
_Run = Callable[[Any, Sequence[Any]], Sequence[Any]]


class RepeatedFunction:
    """`count` calls of a function, one after the other.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      count: how many calls, at least 2.
      is_shared: for each of its inputs, its captures left out, whether all calls are given the same one.
    """

    def __init__(self, concrete: Any, count: int, is_shared: Sequence[bool]) -> None:
        self._count = count
        captures = len(concrete.inputs) - len(is_shared)
        self._is_shared = (*is_shared, *[True] * captures)
        self._packed, self._loose = _by_transfer(concrete.outputs)
        self._shapes = [output.shape for output in concrete.outputs]
        self._concrete = _build(concrete, count, self._is_shared, self._packed, self._loose)

    def call_on(
        self,
        steps: Sequence[Sequence[Any]],
        captures: Sequence[Any],
        run: Callable[[Any, Sequence[Any]], Sequence[Any]],
    ) -> list[list[Any]]:
        """Runs it, and brings what the steps return to the client.

        Args:
          steps: the inputs of each, captures left out: tensors, on the client where they are not shared.
          captures: what all of them are given besides.
          run: runs a concrete function with such inputs.

        Returns:
          For each step the flat outputs of the function, as NumPy values.
        """
        inputs = [
            values[0] if is_shared else tf.stack(values)
            for values, is_shared in zip(zip(*steps, strict=True), self._is_shared, strict=False)
        ]
        fetched = [tensor.numpy() for tensor in run(self._concrete, [*inputs, *captures])]
        results: list[list[Any]] = [[None] * len(self._shapes) for _ in range(self._count)]
        for positions, values in zip(self._packed, fetched, strict=False):
            self._unpack(positions, values, results)
        rest = iter(fetched[len(self._packed) :])
        for result in results:
            for position in self._loose:
                result[position] = next(rest)
        return results

    def _unpack(self, positions: Sequence[int], values: Any, results: Sequence[list[Any]]) -> None:
        start = 0
        for result in results:
            for position in positions:
                shape = self._shapes[position]
                end = start + shape.num_elements()
                # A copy, so that a result that is kept does not keep those of the other steps.
                result[position] = values[start:end].reshape(shape).copy() if shape.rank else values[start]
                start = end


def _build(
    concrete: Any,
    count: int,
    is_shared: Sequence[bool],
    packed: Sequence[Sequence[int]],
    loose: Sequence[int],
) -> Any:
    """Traces the function of all steps; what it is traced from must not keep the repeated function alive."""
    signature = [
        tf.TensorSpec(tensor.shape if is_one else [count, *tensor.shape], tensor.dtype)
        for tensor, is_one in zip(concrete.inputs, is_shared, strict=True)
    ]
    steps = StepCopies(concrete, count)
    names = [f"step_{step}" for step in range(count)]

    def repeat(*given: Any) -> list[Any]:
        steps.note_inputs(given)
        inputs = [
            [value] * count if is_one else tf.unstack(value, count)
            for value, is_one in zip(given, is_shared, strict=True)
        ]
        outputs = [steps.add([each[step] for each in inputs], name) for step, name in enumerate(names)]
        together = [_pack([found[position] for found in outputs for position in each]) for each in packed]
        return together + [found[position] for found in outputs for position in loose]

    return tensorflow_internals.built_function(repeat, signature, lambda graph: steps.pack_transfers(graph, names))


def _by_transfer(outputs: Sequence[Any]) -> tuple[list[list[int]], list[int]]:
    """The positions of outputs that are brought together, by their type, and of those that are brought one by one."""
    packed: dict[tf.DType, list[int]] = {}
    loose = []
    for position, output in enumerate(outputs):
        if output.shape.is_fully_defined() and output.dtype in _STACKED:
            packed.setdefault(output.dtype, []).append(position)
        else:
            loose.append(position)
    return list(packed.values()), loose


def _pack(values: Sequence[Any]) -> Any:
    """All elements of all values, in a vector."""
    if all(value.shape.rank == 0 for value in values):
        return tf.stack(values)
    return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)


def is_stackable(value: Any) -> bool:
    """Whether such an input may differ from step to step: numbers or strings that are on the client."""
    if isinstance(value, tf.Tensor):
        is_on_client = tf.DeviceSpec.from_string(value.device).job == CLIENT_JOB
        return is_on_client and value.dtype in _STACKED
    return isinstance(value, np.ndarray | np.generic | int | float | complex | str | bytes)
