"""The initial value of a variable that may be sharded, by rows, so that no server computes more than its part."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# A value that can only be computed as a whole, on each server, is refused if it is larger, in bytes.
LARGEST_WHOLE = 2**28
# How many bytes of a value that is computed by rows are computed at once.
BLOCK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class InitialValue:
    """An initial value that can be computed by rows.

    Attributes:
      shape: of the whole value.
      dtype: likewise.
      rows: called with the first row and the number of rows, returns these rows.
      whole: what to give to the constructor of a variable that is not sharded.
      block_rows: how many rows are computed together, at multiples of this number; None for all that are asked for.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    rows: Callable[[int, int], Any]
    whole: Any
    block_rows: int | None = None


def rows_of_block(shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Returns the number of rows in a block of a value."""
    return max(1, BLOCK_BYTES // (dtype.size * max(1, shape[1:].num_elements() or 0)))


class RowsInBlocks:
    """The initial value of some rows, written block by block: a server needs memory for the rows and one block.

    Args:
      initial: the initial value of all rows; with `block_rows`.
      first: the first of the rows.
      count: the number of rows.
    """

    def __init__(self, initial: InitialValue, first: int, count: int) -> None:
        self._initial, self._first, self._count = initial, first, count

    def __call__(self) -> tf.Tensor:
        """Returns memory for the rows, whose content is not defined until `write`."""
        shape = [self._count, *self._initial.shape[1:]]
        return tf.raw_ops.Empty(shape=shape, dtype=self._initial.dtype, init=False)

    def write(self, variable: tf.Variable) -> None:
        """Writes all rows into a variable that has them, and no others."""
        size, end = self._initial.block_rows, self._first + self._count
        assert size is not None
        borders = [self._first, *range(self._first // size * size + size, end, size), end]
        for begin, following in itertools.pairwise(borders):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=variable.handle,
                begin=[begin - self._first],
                end=[following - self._first],
                strides=[1],
                value=self._initial.rows(begin, following - begin),
            )


def initial_value_of(value: Any, shape: Any = None, dtype: Any = None, name: str | None = None) -> InitialValue:
    """Returns the initial value that was given to the constructor of a variable.

    Args:
      value: a value, or a function without arguments that returns it. A function may take `partition_shape` and
        `partition_offset`, and return these rows; then it is called for each block of a part. If not, it is called for
        each part, and rows are taken of the result.
      shape: None if it is that of the value. If it is None, a function has to be called once to learn it.
      dtype: likewise.
      name: of the variable, for messages.
    """
    if not callable(value):
        value = tf.convert_to_tensor(value, dtype)
        return InitialValue(value.shape, value.dtype, lambda first, count: value[first : first + count], value)
    if shape is not None and dtype is not None:
        shape, dtype = tf.TensorShape(shape), tf.as_dtype(dtype)
        rows = functools.partial(_rows_of_function, value, shape, dtype, name)
        return InitialValue(shape, dtype, rows, value, rows_of_block(shape, dtype) if _names_partition(value) else None)
    first = tf.convert_to_tensor(value(), dtype)
    known = initial_value_of(value, first.shape, first.dtype, name)
    return dataclasses.replace(known, whole=first)


def _rows_of_function(
    function: Callable[..., Any], shape: tf.TensorShape, dtype: tf.DType, name: str | None, first: int, count: int
) -> Any:
    partition_shape = (count, *shape[1:])
    if _takes_partition(function):
        # An initializer that does not know these arguments may take any, and refuse them when it is called.
        try:
            value = function(partition_shape=partition_shape, partition_offset=(first, *[0] * len(shape[1:])))
        except (TypeError, ValueError):
            value = None
        if value is not None and tuple(value.shape) == partition_shape:
            return value
    return rows_of_whole(function, shape, dtype, name, first, count)


def rows_of_whole(
    function: Callable[[], Any], shape: tf.TensorShape, dtype: tf.DType, name: str | None, first: int, count: int
) -> Any:
    """Returns rows of the whole value that a function returns.

    Raises:
      ValueError: the whole value is large; the message says how to have it computed in parts.
    """
    size = shape.num_elements() * dtype.size
    if size > LARGEST_WHOLE:
        raise ValueError(
            f"The sharded variable {name!r} of shape {shape} cannot be created: its initial value can only be computed "
            f"as a whole, which would take {size / 2**20:,.0f} MB on each parameter server. Give it one of Keras' "
            "random or constant initializers, or shape=, dtype= and a function that takes partition_shape and "
            "partition_offset and returns these rows; or zeros, and assign its rows in steps."
        )
    return tf.convert_to_tensor(function(), dtype)[first : first + count]


def _takes_partition(function: Callable[..., Any]) -> bool:
    return _names_partition(function) or any(each.kind is each.VAR_KEYWORD for each in _parameters(function))


def _names_partition(function: Callable[..., Any]) -> bool:
    return {"partition_shape", "partition_offset"} <= {each.name for each in _parameters(function)}


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
