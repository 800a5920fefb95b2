"""The outputs of several runs of a function as one array for each output, with the runs along its first axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.runs_future import RunsFuture


def stackable(call: Any) -> Any:
    """Returns a `ScheduledCall` that is to run many times; raises ValueError if that is not possible."""
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
    """Returns the values of an output in several runs as an array, an array of arrays if their shapes differ.

    Args:
      values: an array already, or a sequence of NumPy values, or of bytes.
    """
    if isinstance(values, np.ndarray):
        return values
    if len({np.shape(value) for value in values}) == 1 and not isinstance(values[0], bytes):
        return np.stack(values)
    found = np.empty(len(values), object)
    for place, value in enumerate(values):
        found[place] = value
    return found


def own_memory(value: Any) -> Any:
    """Returns a copy of an array, so that one result does not keep the memory of all steps alive."""
    return value.copy() if isinstance(value, np.ndarray) else value


def concatenated(results: Sequence[Any]) -> Any:
    """Returns stacked results of consecutive runs as one, in their structure.

    Raises:
      ValueError: the shapes of an output differ from run to run.
    """
    return tf.nest.map_structure(_concatenated, *results)


def _concatenated(*parts: Any) -> Any:
    if parts[0] is None:
        return None
    shapes = {np.shape(value) for part in parts for value in (part if part.dtype == object else part[:1])}
    if len(shapes) > 1:
        raise ValueError(
            f"The runs of a function that was scheduled with steps= returned values of the shapes {sorted(shapes)}, "
            "which cannot be stacked. Return values of one shape, or use strategy.map."
        )
    return np.concatenate(parts)
