"""The arguments of what a function on the client calls: a structure in which some leaves are tensors of its graph.

when it is traced    (x, iterator, future)     the inputs of an operation: x, the handle of the future
when it runs         (3.0, iterator, future)   the structure with their values
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.calls.graph_future import Futures, GraphFuture
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource


class ClientArguments:
    """The arguments of a call in a function on the client, some of which are tensors of its graph.

    Args:
      given: a nested structure.
      futures: those whose handles are in use.
      types: the types of results, by number.

    Attributes:
      inputs: the tensors.
      specs: the structure, with `tf.TypeSpec`s in place of what has tensors.
    """

    def __init__(self, given: Any, futures: Futures, types: Sequence[Any]) -> None:
        self.inputs: list[Any] = []
        self._futures = futures
        self._types = types
        # How each leaf is made when the graph runs, and from how many values.
        self._leaves: list[tuple[Callable[..., Any], int]] = []
        self.specs = tf.nest.map_structure(self._add, given)
        self._structure = tf.nest.map_structure(lambda _: 0, given)

    def _add(self, leaf: Any) -> Any:
        """Adds a leaf; returns its `tf.TypeSpec`, or the leaf itself if it has no tensor of the graph."""
        if isinstance(leaf, GraphFuture):
            self.inputs.append(leaf.handle)
            self._leaves.append((self._futures.__getitem__, 1))
            return self._types[leaf.result_type]
        # With `coordinator.compat`, an iterator of the workers is taken for a composite tensor.
        is_per_worker = isinstance(leaf, PerWorkerResource)
        tensors = [] if is_per_worker else tf.nest.flatten(leaf, expand_composites=True)
        if not any(tf.is_symbolic_tensor(tensor) for tensor in tensors):
            self._leaves.append((lambda: leaf, 0))
            return leaf
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in tensors):
            raise TypeError(
                f"{leaf!r} cannot be passed to schedule in a tf.function on the client. Refer to the variable, "
                "iterator or dataset that was made outside of it, in place of an argument of the tf.function."
            )
        self.inputs.extend(tensors)
        spec = tf.type_spec_from_value(leaf)
        self._leaves.append((functools.partial(_with_values, spec), len(tensors)))
        return spec

    def with_values(self, values: Sequence[Any]) -> Any:
        """Returns the structure with the values of `inputs`."""
        rest = iter(values)
        leaves = [make(*itertools.islice(rest, count)) for make, count in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _with_values(spec: tf.TypeSpec, *values: Any) -> Any:
    """Returns a value of a type, with the values of its components."""
    if isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string:
        return np.asarray(values[0])
    components = tf.nest.flatten(spec, expand_composites=True)
    tensors = [tf.constant(value, each.dtype) for value, each in zip(values, components, strict=True)]
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
