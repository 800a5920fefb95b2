r"""Several calls of one traced function as a single call, which costs one round trip to the worker.

    inputs     [shared]  [one per step, stacked]          captures, including handles
                  |       /        |        \              |
    worker     step 0 --------> step 1 --------> step 2   ordered where they use the same resource
                  \_______________|_______________/
    outputs            joined by type, one transfer each

The steps have the same effects as separate calls. Operations of several steps that use the same variable, dataset or
other resource run in the order of the steps. Each step has its own inputs and results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.fusing.graph_copies import GraphCopies, gated_function
from coordinator.ps_strategy.fusing.message_packing import PACKED_TYPES
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB
from coordinator.queueing.closure import RunsFuture

_FUSING_DISABLED = "coordinator_fusing_disabled"
# TensorFlow has kernels that stack, join and split tensors of these types. Tensors of more types can be sent.
_STACKED = frozenset(
    {
        *PACKED_TYPES,
        *(tf.bool, tf.complex64, tf.complex128, tf.string),
        *(tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn),
    }
)
# The kinds of NumPy types whose arrays TensorFlow copies unchanged.
_NUMBERS = "biufc"


def stackable(call: Any) -> Any:
    """Returns a `ScheduledCall` that can run many times; raises ValueError if it cannot."""
    name = call.function.name
    if call.repeats is not None:
        raise ValueError(f"The function {name!r} was scheduled with steps= and fetch=False. Leave one of them out.")
    if call.followers:
        raise ValueError(
            f"The function {name!r} was scheduled with steps= and a range of examples, which each run would read "
            "again. Schedule one call for each range, for example with strategy.map."
        )
    for spec in tf.nest.flatten(call.function.result_spec):
        if not (spec is None or isinstance(spec, tf.TensorSpec)):
            raise ValueError(
                f"The function {name!r} was scheduled with steps=, which stacks what its runs return, but returns "
                f"{spec}. Return dense tensors, or use strategy.map, which returns a future for each run."
            )
    return call


def spec_of(future: Any) -> Any:
    """Returns the `tf.TypeSpec`s of the result of a future that `schedule` returned."""
    spec = future.origin.result_spec
    if not isinstance(future, RunsFuture):
        return spec
    first = tf.TensorShape([future.steps])
    return tf.nest.map_structure(lambda each: each and tf.TensorSpec(first.concatenate(each.shape), each.dtype), spec)


def stacked(values: Any) -> Any:
    """Returns the values of an output in several runs as an array, or as an array of objects if their shapes differ.

    `values` is an array already, or a sequence of NumPy values or of bytes.
    """
    if isinstance(values, np.ndarray):
        return values
    if len({np.shape(value) for value in values}) == 1 and not isinstance(values[0], bytes):
        return np.stack(values)
    arrays = np.empty(len(values), object)
    for place, value in enumerate(values):
        arrays[place] = value
    return arrays


def own_memory(value: Any) -> Any:
    """Copies an array, so that one result does not keep the memory of all steps alive."""
    return value.copy() if isinstance(value, np.ndarray) else value


def concatenated_runs(results: Sequence[Any]) -> Any:
    """Joins stacked results of consecutive runs; raises ValueError if the shapes of an output differ."""

    def concatenated(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        shapes = {np.shape(value) for part in parts for value in (part if part.dtype == object else part[:1])}
        if len(shapes) > 1:
            raise ValueError(
                "The runs of a function that was scheduled with steps= returned values of the shapes "
                f"{sorted(shapes)}, which cannot be stacked. Return values of one shape, or use strategy.map."
            )
        return np.concatenate(parts)

    return tf.nest.map_structure(concatenated, *results)


def disable_fusing() -> None:
    """Disables fusing for the function that is being traced, and for every function that calls it."""
    tf.no_op(name=_FUSING_DISABLED)


def may_be_fused(concrete: Any) -> bool:
    """Returns True if neither a concrete function nor a function that it calls has disabled fusing."""
    graph = concrete.graph.as_graph_def()
    inner = (node for function in graph.library.function for node in function.node_def)
    return not any(_FUSING_DISABLED in node.name for nodes in (graph.node, inner) for node in nodes)


class RepeatedFunction:
    """`count` calls, at least 2, of a concrete function, in order.

    `is_shared` says for each input, without captures, whether all calls take the same tensor.
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

        `inputs` are the values of `StackedInputs`; `captures` are the same for all steps; `go` opens the gate of the
        function, see `gated_function`. `run` calls a concrete function and returns its flat outputs.

        Returns the values of each flat output in all steps: an array with the steps along its first axis, or a list of
        NumPy values if TensorFlow does not know their shape.
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
        fetched_singly = fetched[len(self._joined) :]
        for number, position in enumerate(self._single):
            columns[position] = fetched_singly[number :: len(self._single)]
        return columns


def _build(
    concrete: Any, count: int, is_shared: Sequence[bool], joined: Sequence[Sequence[int]], single: Sequence[int]
) -> Any:
    """Builds the function of all steps. This is no method: a closure over `self` would keep `self` alive."""
    signature = [
        tf.TensorSpec(tensor.shape if is_one else [count, *tensor.shape], tensor.dtype)
        for tensor, is_one in zip(concrete.inputs, is_shared, strict=True)
    ]
    steps = GraphCopies(concrete, count)
    names = [f"step_{step}" for step in range(count)]

    def repeat(*inputs: Any) -> list[Any]:
        steps.note_inputs(inputs)
        columns = [
            [value] * count if is_one else tf.unstack(value, count)
            for value, is_one in zip(inputs, is_shared, strict=True)
        ]
        outputs = [steps.add([column[step] for column in columns], name) for step, name in enumerate(names)]
        vectors = [_join([of_step[place] for of_step in outputs for place in places]) for places in joined]
        return vectors + [of_step[place] for of_step in outputs for place in single]

    return gated_function(repeat, signature, lambda graph: steps.pack_transfers(graph, names))


def _by_transfer(outputs: Sequence[Any]) -> tuple[list[list[int]], list[int]]:
    joined: dict[tf.DType, list[int]] = {}
    single = []
    for position, output in enumerate(outputs):
        if output.shape.is_fully_defined() and output.dtype in _STACKED:
            joined.setdefault(output.dtype, []).append(position)
        else:
            single.append(position)
    return list(joined.values()), single


def _join(values: Sequence[Any]) -> Any:
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
    return bool(tf.DeviceSpec.from_string(device).job == CLIENT_JOB)


class StackedInputs(NamedTuple):
    """The inputs of a fused call, without captures: for each input one value that all steps share, or one per step.

    `values` has a tensor for each input: the shared value, or the values of all `length` steps along a new first axis.
    """

    length: int
    values: Sequence[Any]
    is_shared: tuple[bool, ...]

    @classmethod
    def of_steps(cls, steps: Sequence[Sequence[Any]]) -> "StackedInputs":
        """Stacks the inputs of the steps; a shared input is the same object in all steps."""
        columns = list(zip(*steps, strict=True))
        is_shared = tuple(all(value is values[0] for value in values) for values in columns)
        values = [values[0] if is_one else tf.stack(values) for values, is_one in zip(columns, is_shared, strict=True)]
        return cls(len(steps), values, is_shared)

    @classmethod
    def of_arguments(
        cls, steps: Sequence[Sequence[Any]], bind: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> "StackedInputs | None":
        """Stacks the arguments of the steps, and binds them once; returns None if each step must be bound.

        TensorFlow takes some 50 microseconds to bind the arguments of one step, mostly to make a tensor of each array.
        So only the first step's arguments are bound, and arrays that differ from step to step become one tensor.
        `steps` and `bind` have flattened arguments; a shared argument is the same object in all steps.
        """
        first = list(steps[0])
        # The key is the id of the tensor that is bound for the first step, which finds this tensor among the inputs.
        stacked: dict[int, Any] = {}
        for place, values in enumerate(zip(*steps, strict=True)):
            if all(value is values[0] for value in values):
                continue
            if (together := _stack(values)) is None:
                return None
            first[place] = values[0] if isinstance(values[0], tf.Tensor) else tf.constant(values[0])
            stacked[id(first[place])] = together
        try:
            inputs = bind(first)
        except TypeError:
            # The function may take arguments of a type to which TensorFlow converts arrays, but not tensors.
            return None
        is_shared = tuple(id(value) not in stacked for value in inputs)
        if is_shared.count(False) != len(stacked):
            return None
        return cls(len(steps), [stacked.get(id(value), value) for value in inputs], is_shared)

    def of_step(self, step: int) -> list[Any]:
        return [value if is_one else value[step] for value, is_one in zip(self.values, self.is_shared, strict=True)]

    def stacked_as(self, is_shared: tuple[bool, ...]) -> "StackedInputs | None":
        """Returns the same inputs with more inputs stacked; None if an input that differs would have to be shared."""
        if is_shared == self.is_shared:
            return self
        values = list(self.values)
        for number, (is_one, shall_be_one) in enumerate(zip(self.is_shared, is_shared, strict=True)):
            if shall_be_one and not is_one:
                return None
            if is_one and not shall_be_one:
                values[number] = tf.stack([values[number]] * self.length)
        return StackedInputs(self.length, values, is_shared)


def _stack(values: Sequence[Any]) -> Any:
    """Stacks tensors, or arrays of numbers, of one type and shape as a tensor; returns None for anything else."""
    dtype = getattr(values[0], "dtype", None)
    if any(getattr(value, "dtype", None) != dtype for value in values):
        return None
    if isinstance(dtype, tf.DType) and all(isinstance(value, tf.Tensor) for value in values):
        return tf.stack(values)
    if isinstance(dtype, np.dtype) and dtype.kind in _NUMBERS and dtype.isnative:
        return tf.constant(np.array(values))
    return None
