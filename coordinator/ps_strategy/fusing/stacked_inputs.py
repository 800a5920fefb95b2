"""The inputs of a fused call: for each input of the function, one value that all steps share, or those of all steps.

TensorFlow takes some 50 microseconds to bind the arguments of one step, mostly to make a tensor of each array. So only
those of the first step are bound, and arrays that differ from step to step become one tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# The kinds of NumPy's types whose arrays TensorFlow copies as they are.
_NUMBERS = "biufc"


class StackedInputs(NamedTuple):
    """The inputs of a fused call, without captures.

    Attributes:
      length: the number of steps.
      values: a tensor for each input, with the values of all steps along a new first axis if they differ.
      is_shared: for each input, whether they do not.
    """

    length: int
    values: Sequence[Any]
    is_shared: tuple[bool, ...]

    @classmethod
    def of_steps(cls, steps: Sequence[Sequence[Any]]) -> "StackedInputs":
        """Stacks the inputs of each step; what they share is the same object."""
        columns = list(zip(*steps, strict=True))
        is_shared = tuple(all(value is values[0] for value in values) for values in columns)
        values = [values[0] if is_one else tf.stack(values) for values, is_one in zip(columns, is_shared, strict=True)]
        return cls(len(steps), values, is_shared)

    @classmethod
    def of_arguments(
        cls, steps: Sequence[Sequence[Any]], bind: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> "StackedInputs | None":
        """Stacks the arguments of each step, and binds them once.

        Args:
          steps: for each step, its flattened arguments; what they share is the same object.
          bind: takes flattened arguments, returns the inputs for them.

        Returns:
          The inputs; None if each step must be bound.
        """
        first = list(steps[0])
        # By the identity of what is bound in the place of the first step's argument, and so found among the inputs.
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
            # The function may take another type, to which TensorFlow converts an array and no tensor.
            return None
        is_shared = tuple(id(each) not in stacked for each in inputs)
        if is_shared.count(False) != len(stacked):
            return None
        return cls(len(steps), [stacked.get(id(each), each) for each in inputs], is_shared)

    def of_step(self, step: int) -> list[Any]:
        """Returns the inputs of one step."""
        return [value if is_one else value[step] for value, is_one in zip(self.values, self.is_shared, strict=True)]

    def stacked_as(self, is_shared: tuple[bool, ...]) -> "StackedInputs | None":
        """Returns the same inputs of which more are stacked; None if one would have to be shared that differs."""
        if is_shared == self.is_shared:
            return self
        changed = [
            number for number, pair in enumerate(zip(self.is_shared, is_shared, strict=True)) if pair[0] != pair[1]
        ]
        if not all(self.is_shared[number] for number in changed):
            return None
        values = list(self.values)
        for number in changed:
            values[number] = tf.stack([values[number]] * self.length)
        return StackedInputs(self.length, values, is_shared)


def _stack(values: Sequence[Any]) -> Any:
    """Returns tensors, or arrays of numbers, of one type and shape, stacked as a tensor; None for anything else."""
    dtype = getattr(values[0], "dtype", None)
    if any(getattr(value, "dtype", None) != dtype for value in values):
        return None
    if isinstance(dtype, tf.DType) and all(isinstance(value, tf.Tensor) for value in values):
        return tf.stack(values)
    if isinstance(dtype, np.dtype) and dtype.kind in _NUMBERS and dtype.isnative:
        return tf.constant(np.array(values))
    return None
