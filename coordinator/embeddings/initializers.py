"""Initial rows of tables, as pure functions of the key.

So a key gets the same row in whatever order keys come, on however many servers, and again after it was evicted. An
initializer is a function `(keys, dim)` that takes int64 keys [n] and returns float32 rows [n, dim]; any such function
of TensorFlow operations will do.
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from coordinator.embeddings.keys import uniform_bits
from coordinator.setting_checks import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Rows of numbers that are uniformly distributed between -`scale` and `scale`.

    Args:
      scale: positive.
      seed: another seed gives other rows; an integer of 64 bits.
    """

    scale: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)
        _check_seed(self.seed)

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        return (_unit_interval(uniform_bits(keys, dim, self.seed)) * 2.0 - 1.0) * self.scale


@dataclasses.dataclass(frozen=True)
class Normal:
    """Rows of numbers that are normally distributed around zero.

    Args:
      stddev: the standard deviation; positive.
      seed: another seed gives other rows; an integer of 64 bits.
    """

    stddev: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("stddev", self.stddev, above=0)
        _check_seed(self.seed)

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        numbers = _unit_interval(uniform_bits(keys, 2 * dim, self.seed))
        # Box and Muller (1958). No number is 0, so that the logarithm is finite.
        radius = tf.sqrt(-2.0 * tf.math.log(numbers[:, :dim]))
        return radius * tf.cos(2.0 * math.pi * numbers[:, dim:]) * self.stddev


@dataclasses.dataclass(frozen=True)
class Constant:
    """Rows of which each number is `value`."""

    value: float = 0.0

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        return tf.fill([tf.size(keys), dim], tf.constant(self.value, tf.float32))


def _check_seed(seed: Any) -> None:
    check_integer("seed", seed, minimum=-(2**63), maximum=2**63 - 1)


def _unit_interval(bits: Any) -> Any:
    """Returns numbers between 0 and 1, both excluded, float32, from the 23 highest bits."""
    # With 24, the sum would be rounded.
    highest = tf.bitwise.right_shift(bits, tf.constant(41, tf.uint64))
    return (tf.cast(tf.bitcast(highest, tf.int64), tf.float32) + 0.5) * 2.0**-23
