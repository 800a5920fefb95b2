"""A range of examples as an argument of a scheduled function, which learns what becomes of that function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.late_ranges import LateRange
from coordinator.future import Future


class PositionRange(np.ndarray[Any, np.dtype[np.int64]]):
    """An int64 vector that names a range of examples.

    It is an argument like any other array: it travels in one message, and functions that take one are fused. Arrays
    that are made from it, such as slices, are not followed.

    Attributes:
      number: of the range in all epochs.
      follower: called with it and the future of each function that is scheduled with it, before that can run.
    """

    number: int
    follower: Callable[["PositionRange", Future], None] | None = None

    def follow(self, future: Future) -> None:
        """Records that a function is scheduled with it."""
        if self.follower is not None:
            self.follower(self, future)


_KINDS = frozenset({PositionRange, LateRange})


def position_ranges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PositionRange | LateRange]:
    """Returns the ranges among the arguments of a function, also inside of structures."""
    found = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _KINDS:
            found.append(value)
        elif kind in (tuple, list, dict):
            found += [leaf for leaf in tf.nest.flatten(value) if type(leaf) in _KINDS]
    return found
