"""A range of examples as an argument of a scheduled function, which learns what becomes of that function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.future import Future


class PositionRange(np.ndarray[Any, np.dtype[np.int64]]):
    """An int64 vector that names a range of examples.

    It is an argument like any other array: it travels in one message, and functions that take one are fused. Arrays
    that are made from it, such as slices, are not followed.

    Attributes:
      follow: called with the future of each function that is scheduled with it, before that can run.
    """

    follow: Callable[[Future], None] | None = None


def position_ranges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PositionRange]:
    """Returns the ranges among the arguments of a function that have a follower, also inside of structures."""
    found = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is PositionRange:
            found.append(value)
        elif kind in (tuple, list, dict):
            found += [leaf for leaf in tf.nest.flatten(value) if type(leaf) is PositionRange]
    return [each for each in found if each.follow is not None]
