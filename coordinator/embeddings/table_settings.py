"""The settings of a table: keys, initial rows, admission, eviction and optimizer.

An initial row is a pure function of its key. A key therefore gets the same row in any order of the keys, on any number
of servers, and again after an eviction. An initializer is a function `(keys, dim)` of TensorFlow operations, which
takes int64 keys [n] and returns float32 rows [n, dim].
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.options import check_integer, check_number
from coordinator.ps_strategy.keras.internals.optimizers import is_optimizer
from coordinator.ps_strategy.keras.internals.row_updates import RowOptimizer

# Each key belongs to one bucket, which does not depend on the number of servers. Each server has a range of buckets.
BUCKETS = 1024
_BUCKET_BITS = 10

# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_MULTIPLIERS = np.int64(-4658895280553007687), np.int64(-7723592293110705685)
_INCREMENT = np.int64(-7046029254386353131)
# An arbitrary key of SipHash. Other programs have other keys.
_STRING_HASH_KEY = [0x636F6F7264696E61, 0x746F722F6B657973]


def as_integers(keys: Any) -> Any:
    """Returns keys as int64, in the same shape. Raises TypeError if the keys are neither integers nor strings.

    Strings are hashed to 63 bits by SipHash. Of n strings, about n * n / 2**64 pairs collide.
    """
    keys = tf.convert_to_tensor(keys)
    if keys.dtype == tf.string:
        return tf.strings.to_hash_bucket_strong(keys, 2**63 - 1, _STRING_HASH_KEY)
    if not keys.dtype.is_integer:
        raise TypeError(f"Keys of a table are integers or strings, got {keys.dtype.name}.")
    return tf.cast(keys, tf.int64)


def _mixed(keys: Any) -> Any:
    """Returns each key with its bits mixed by splitmix64, as int64 of the same shape."""
    keys = _xor_shift(keys + _INCREMENT, 30) * _MULTIPLIERS[0]
    keys = _xor_shift(keys, 27) * _MULTIPLIERS[1]
    return _xor_shift(keys, 31)


def _uniform(keys: Any, columns: int, seed: int) -> Any:
    """Returns random numbers above 0 and below 1, float32 [n, columns], that depend only on key, column and seed."""
    # The key sets the state of splitmix64. Each number mixes the state after one more increment.
    start = _mixed(keys + np.int64(seed))
    steps = np.arange(columns, dtype=np.int64)
    with np.errstate(over="ignore"):
        steps = steps * _INCREMENT
    bits = tf.bitcast(_mixed(start[:, tf.newaxis] + steps), tf.uint64)
    # Only the 23 highest bits are used. With 24 bits, the sum below would be rounded.
    highest = tf.bitwise.right_shift(bits, tf.constant(41, tf.uint64))
    return (tf.cast(tf.bitcast(highest, tf.int64), tf.float32) + 0.5) * 2.0**-23


def bucket_of(keys: Any) -> Any:
    """Returns the bucket of each key, int32."""
    return tf.cast(_right_shift(_mixed(keys), 64 - _BUCKET_BITS), tf.int32)


def hash_position(keys: Any) -> Any:
    """Returns a unique int64 number for each key. The numbers are in the order of the keys' buckets and servers."""
    return tf.bitwise.bitwise_xor(_mixed(keys), tf.int64.min)


def in_hash_order(keys: Any) -> Any:
    """Returns the keys [n] sorted by `hash_position`, without duplicates."""
    keys = tf.gather(keys, tf.argsort(hash_position(keys)))
    is_first = tf.concat([tf.ones([tf.minimum(tf.size(keys), 1)], tf.bool), keys[1:] != keys[:-1]], 0)
    return tf.boolean_mask(keys, is_first)


def server_of(buckets: Any, servers: int) -> Any:
    """Returns the server index of each bucket. Each server has a range of buckets, in order."""
    return buckets * servers // BUCKETS


def capacities(capacity: int, servers: int) -> list[int]:
    """Returns the number of rows of each server, in proportion to the server's buckets and rounded up."""
    owned = np.bincount(np.arange(BUCKETS) * servers // BUCKETS, minlength=servers)
    return [int(-(-capacity * int(buckets) // BUCKETS)) for buckets in owned]


def _right_shift(numbers: Any, bits: int) -> Any:
    shifted = tf.bitwise.right_shift(tf.bitcast(numbers, tf.uint64), tf.constant(bits, tf.uint64))
    return tf.bitcast(shifted, tf.int64)


def _xor_shift(numbers: Any, bits: int) -> Any:
    return tf.bitwise.bitwise_xor(numbers, _right_shift(numbers, bits))


@dataclasses.dataclass(frozen=True)
class MinCount:
    """Admits a key at its n-th look-up in training.

    A look-up counts each of its keys once. The servers count at most as many pending keys as the table may have rows,
    and drop the oldest pending keys beyond this number.

    Args:
      n: the number of look-ups, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1)

    @property
    def counts(self) -> bool:
        """Whether pending keys are counted."""
        return self.n > 1

    def admits(self, times: Any) -> Any:
        """Returns which keys to admit, bool [n], from the numbers of their earlier look-ups, int64 [n]."""
        return times + 1 >= self.n


@dataclasses.dataclass(frozen=True)
class Probability:
    """Admits a key with the probability `p` at each look-up in training.

    Nothing is stored for keys that are not admitted. On average, a key is admitted at its 1/p-th look-up.

    Args:
      p: the probability, above 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        check_number("p", self.p, above=0, maximum=1)

    counts = False

    def admits(self, times: Any) -> Any:
        """Returns which keys are admitted; see `MinCount.admits`."""
        # The operation has no seed, so that the steps of a fused call draw different numbers.
        return tf.raw_ops.RandomUniform(shape=tf.shape(times), dtype=tf.float32, seed=0, seed2=0) < self.p


Admission = MinCount | Probability


@dataclasses.dataclass(frozen=True)
class OlderThan:
    """Evicts rows that have had no gradient in the last `steps` steps of the table.

    Args:
      steps: the number of calls of `apply_gradients` by all workers together, at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)


@dataclasses.dataclass(frozen=True)
class SmallerThan:
    """Evicts rows whose Euclidean norm is below `norm`.

    Args:
      norm: the smallest norm that is kept, positive. New rows have the norm that the initializer gives them.
    """

    norm: float

    def __post_init__(self) -> None:
        check_number("norm", self.norm, above=0)


Eviction = OlderThan | SmallerThan


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Rows of numbers that are uniformly distributed between -`scale` and `scale`.

    Args:
      scale: the bound of the numbers, positive.
      seed: a 64-bit integer. Other seeds give other rows.
    """

    scale: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)
        check_integer("seed", self.seed, minimum=-(2**63), maximum=2**63 - 1)

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        return (_uniform(keys, dim, self.seed) * 2.0 - 1.0) * self.scale


@dataclasses.dataclass(frozen=True)
class Normal:
    """Rows of numbers that are normally distributed around zero.

    Args:
      stddev: the standard deviation, positive.
      seed: a 64-bit integer. Other seeds give other rows.
    """

    stddev: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("stddev", self.stddev, above=0)
        check_integer("seed", self.seed, minimum=-(2**63), maximum=2**63 - 1)

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        numbers = _uniform(keys, 2 * dim, self.seed)
        # The transform of Box and Muller (1958). No number is 0, so the logarithm is finite.
        radius = tf.sqrt(-2.0 * tf.math.log(numbers[:, :dim]))
        return radius * tf.cos(2.0 * math.pi * numbers[:, dim:]) * self.stddev


@dataclasses.dataclass(frozen=True)
class Constant:
    """Rows that contain only the number `value`."""

    value: float = 0.0

    def __call__(self, keys: Any, dim: int) -> Any:
        """Returns the initial rows of keys, float32 [n, dim]."""
        return tf.fill([tf.size(keys), dim], tf.constant(self.value, tf.float32))


_WHEN_FULL = ("evict_oldest", "default_row", "error")


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """The checked settings of a table; see `Table`."""

    name: str
    dim: int
    capacity: int
    optimizer: Any
    initializer: Callable[[Any, int], Any]
    admission: Admission
    eviction: Sequence[Eviction]
    when_full: str
    default: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a string that is not empty, got {self.name!r}.")
        check_integer("dim", self.dim, 1)
        check_integer("capacity", self.capacity, 1)
        check_number("default", self.default)
        if not callable(self.initializer):
            raise TypeError(f"initializer must be a function (keys, dim), or None, got {self.initializer!r}.")
        if not isinstance(self.admission, MinCount | Probability):
            raise TypeError(f"admission must be MinCount(n), Probability(p) or None, got {self.admission!r}.")
        for policy in self.eviction:
            if not isinstance(policy, OlderThan | SmallerThan):
                raise TypeError(
                    f"eviction must be OlderThan(steps), SmallerThan(norm) or a list of them, got {policy!r}."
                )
        if self.when_full not in _WHEN_FULL:
            raise ValueError(f"when_full must be one of {_WHEN_FULL}, got {self.when_full!r}.")

    @functools.cached_property
    def update(self) -> Any:
        """A `RowOptimizer`, or an object with the same members for a function. Raises TypeError or ValueError."""
        optimizer = self.optimizer
        if is_optimizer(optimizer):
            return RowOptimizer(optimizer, self.dim)
        if not callable(optimizer) or hasattr(optimizer, "apply_gradients"):
            raise TypeError(f"optimizer must be a Keras 3 optimizer or a function (rows, gradient), got {optimizer!r}.")
        return types.SimpleNamespace(
            slots={},
            learning_rate=None,
            clipped=lambda gradient: gradient,
            rate_at=lambda step: None,  # noqa: ARG005 - the function needs no rate
            update=lambda rows, slots, gradient, step, rate: optimizer(rows, gradient),  # noqa: ARG005
        )
