"""Which steps of a call have finished, and what they returned, should the call fail.

    worker     step 0 ------------> note 0 ----> step 1 ------------> note 1
                  |                   ^             |                   ^
    ps 0       effects of step 0 -- done         effects of step 1 -- done

A note is written on the worker when all effects of its step, and of those before it, have been made on every server:
the results of the step, and how many steps have finished. It is read only after a call has failed. What tells the
worker that a parameter server is done goes with the messages of the next step (`packed_transfers`). The last step
needs no note.

Promise: a step that is noted has finished, whatever happens afterwards. There are no notes where they could not tell
that: if a step calls functions, or has branches or loops, that use variables on parameter servers; nor if its results
are large or of unknown shape.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.packed_transfers import LARGEST_PACKED, places_of

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarHandleOp", "Placeholder"}
)


class StepProgress:
    """The notes of one function of several steps. Each worker has its own.

    Args:
      steps: the name scopes of the steps, in order.
      outputs: what a step returns, as symbolic tensors.
    """

    def __init__(self, steps: Sequence[str], outputs: Sequence[Any]) -> None:
        self._steps = steps
        self._specs = [(output.dtype, output.shape) for output in outputs]
        self._name = f"coordinator/progress/{uuid.uuid4().hex}"
        self._is_noted = all(_is_small(output) for output in outputs)

    def add_notes(self, graph: Any, outputs: Sequence[Sequence[Any]], call: Any, devices: Mapping[str, str]) -> None:
        """Adds the notes to a graph, if they can tell which steps have finished.

        Args:
          graph: of a function that is not made yet, with all control dependencies in it.
          outputs: of each step.
          call: the number of the call, an int64 scalar.
          devices: see `pack_transfers`.
        """
        places = places_of(graph, devices)
        # Not of the last step: what has failed if all others have finished is that one.
        effects = [_effects(graph, step, places) for step in self._steps[:-1]]
        self._is_noted = self._is_noted and all(each is not None for each in effects)
        if not self._is_noted:
            return
        noted: list[Any] = []
        with graph.as_default(), tf.control_dependencies(None):
            for number, (returned, made) in enumerate(zip(outputs, effects, strict=False)):
                with tf.name_scope(self._steps[number]):
                    noted = [self._note(number, returned, call, made or {}, noted)]
        graph.control_outputs.extend(noted)

    def read(self, call: int) -> list[list[Any]]:
        """Reads the notes on the current device.

        Args:
          call: the number of the call that failed.

        Returns:
          What the first steps returned, which have finished, as NumPy values; empty if that is not known.

        Raises:
          tf.errors.OpError: the worker does not answer, or has no notes.
        """
        if not self._is_noted:
            return []
        number, finished = _read(f"{self._name}/finished", tf.int64, [2])
        if number != call:
            return []
        return [
            [_read(self._result_name(step, position), *spec) for position, spec in enumerate(self._specs)]
            for step in range(finished)
        ]

    def _note(
        self, number: int, outputs: Sequence[Any], call: Any, effects: Mapping[str, list[Any]], before: Sequence[Any]
    ) -> Any:
        done = []
        for server, made in effects.items():
            if server:
                with tf.device(server), tf.control_dependencies(made):
                    done.append(tf.identity(0.0))
        awaited = [*effects.get("", []), *([tf.add_n(done)] if done else [])]
        with tf.control_dependencies([*awaited, *before]):
            results = [
                _write(self._result_name(number, position), *spec, output)
                for position, (spec, output) in enumerate(zip(self._specs, outputs, strict=True))
            ]
        with tf.control_dependencies([*awaited, *before, *results]):
            return _write(f"{self._name}/finished", tf.int64, [2], tf.stack([call, number + 1]))

    def _result_name(self, step: int, position: int) -> str:
        return f"{self._name}/{step}/{position}"


def _effects(graph: Any, step: str, places: Mapping[str, str]) -> dict[str, list[Any]] | None:
    """The operations of a step that may change something, by place; None if some may be on several servers."""
    found: dict[str, list[Any]] = {}
    for operation in _operations_of(graph, step):
        is_on_servers = any(places[tensor.op.name] for tensor in operation.inputs if tensor.dtype == tf.resource)
        if is_on_servers and _calls_functions(operation):
            return None
        if operation.op_def.is_stateful and operation.type not in _READS:
            found.setdefault(places[operation.name], []).append(operation)
    return found


def _calls_functions(operation: Any) -> bool:
    return any(value.HasField("func") or value.list.func for value in operation.node_def.attr.values())


def _operations_of(graph: Any, step: str) -> Iterator[Any]:
    return (operation for operation in graph.get_operations() if operation.name.startswith(f"{step}/"))


def _is_small(output: Any) -> bool:
    return bool(
        output.shape.is_fully_defined()
        and output.dtype not in (tf.resource, tf.variant)
        and output.shape.num_elements() * output.dtype.size <= LARGEST_PACKED
    )


def _handle(name: str, dtype: tf.DType, shape: Any) -> Any:
    """A variable of this name on the current device; it is made when it is first written."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)


def _write(name: str, dtype: tf.DType, shape: Any, value: Any) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=_handle(name, dtype, shape), value=value)


def _read(name: str, dtype: tf.DType, shape: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=_handle(name, dtype, shape), dtype=dtype).numpy()
