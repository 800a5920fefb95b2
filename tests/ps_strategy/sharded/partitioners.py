"""The partitioner of the shared strategy: variables stay whole, but for tests that ask for parts."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

_active = []


def partitioner_of_test(shape, dtype):
    """Divides a variable as the test asks that is running."""
    return _active[-1](shape=shape, dtype=dtype) if _active else [1] * shape.rank


@contextlib.contextmanager
def partitioned(parts=2, rank=2) -> Iterator[None]:
    """A scope in which variables of the shared strategy are divided.

    Args:
      parts: the number of parts, or a partitioner.
      rank: of the variables that are divided into this number of parts; others stay whole.
    """

    def divide(shape, dtype):
        return [parts if shape.rank == rank else 1] + [1] * (shape.rank - 1)

    _active.append(parts if callable(parts) else divide)
    try:
        yield
    finally:
        _active.pop()


def sharded(strategy, value, parts=2, **options) -> tf.Variable:
    """Returns a sharded variable of the strategy with this value."""
    value = tf.convert_to_tensor(value)
    with strategy.scope(), partitioned(parts, value.shape.rank):
        return tf.Variable(value, **options)
