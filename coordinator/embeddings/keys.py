"""Keys of tables: integers or strings, as 64-bit integers; which bucket a key belongs to, and which server has it."""

from typing import Any

import numpy as np
import tensorflow as tf

# Each key belongs to one of these, whatever the number of servers is. A server has a range of them.
BUCKETS = 1024
_BUCKET_BITS = 10

# Of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_MULTIPLIERS = np.int64(-4658895280553007687), np.int64(-7723592293110705685)
_INCREMENT = np.int64(-7046029254386353131)
# Any number: it separates the hash of strings from those of other programs.
_STRING_HASH_KEY = [0x636F6F7264696E61, 0x746F722F6B657973]


def as_integers(keys: Any) -> Any:
    """Returns keys as int64, of the same shape.

    Strings are hashed to 63 bits, by SipHash; of n strings, about n * n / 2**64 pairs get the same number.

    Raises:
      TypeError: they are neither integers nor strings.
    """
    keys = tf.convert_to_tensor(keys)
    if keys.dtype == tf.string:
        return tf.strings.to_hash_bucket_strong(keys, 2**63 - 1, _STRING_HASH_KEY)
    if not keys.dtype.is_integer:
        raise TypeError(f"Keys of a table are integers or strings, got {keys.dtype.name}.")
    return tf.cast(keys, tf.int64)


def mixed(keys: Any) -> Any:
    """Returns numbers that depend on all bits of the keys, by splitmix64; int64, of the same shape."""
    keys = _xor_shift(keys + _INCREMENT, 30) * _MULTIPLIERS[0]
    keys = _xor_shift(keys, 27) * _MULTIPLIERS[1]
    return _xor_shift(keys, 31)


def uniform_bits(keys: Any, columns: int, seed: int) -> Any:
    """Returns random numbers that are a function of the key, the column and the seed alone, uint64 [n, columns]."""
    # As splitmix64 draws from the state that a key sets: each number mixes the state after one more increment.
    start = mixed(keys + np.int64(seed))
    steps = np.arange(columns, dtype=np.int64)
    with np.errstate(over="ignore"):
        steps = steps * _INCREMENT
    return tf.bitcast(mixed(start[:, tf.newaxis] + steps), tf.uint64)


def bucket_of(keys: Any) -> Any:
    """Returns the bucket of each key, int32."""
    return tf.cast(_right_shift(mixed(keys), 64 - _BUCKET_BITS), tf.int32)


def hash_position(keys: Any) -> Any:
    """Returns numbers whose order is that of the buckets, and so of the servers; int64, another one for each key."""
    return tf.bitwise.bitwise_xor(mixed(keys), tf.int64.min)


def in_hash_order(keys: Any) -> Any:
    """Returns the keys [n] sorted by `hash_position`, each once."""
    keys = tf.gather(keys, tf.argsort(hash_position(keys)))
    is_first = tf.concat([tf.ones([tf.minimum(tf.size(keys), 1)], tf.bool), keys[1:] != keys[:-1]], 0)
    return tf.boolean_mask(keys, is_first)


def server_of(buckets: Any, servers: int) -> Any:
    """Returns which of the servers has each bucket: the first range of buckets is the first server's."""
    return buckets * servers // BUCKETS


def capacities(capacity: int, servers: int) -> list[int]:
    """Divides a number of rows by the number of buckets that each server has, rounded up."""
    owned = np.bincount(np.arange(BUCKETS) * servers // BUCKETS, minlength=servers)
    return [int(-(-capacity * int(buckets) // BUCKETS)) for buckets in owned]


def _right_shift(numbers: Any, bits: int) -> Any:
    shifted = tf.bitwise.right_shift(tf.bitcast(numbers, tf.uint64), tf.constant(bits, tf.uint64))
    return tf.bitcast(shifted, tf.int64)


def _xor_shift(numbers: Any, bits: int) -> Any:
    return tf.bitwise.bitwise_xor(numbers, _right_shift(numbers, bits))
