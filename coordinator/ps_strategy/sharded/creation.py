"""Creates variables, whole or in parts. Each parameter server computes its own rows of the initial value.

Small variables, and variables of equal size, are placed round robin, as in TensorFlow. A large variable goes to the
server with the fewest bytes if the next server of the round robin would hold over a quarter more than that server.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.sharded.sharded_variable import Partition, ShardedVariable

# In bytes. Smaller variables are placed round robin.
_LARGE = 2**20
_TOLERATED = 1.25
# In bytes. A larger initial value is refused if each server would have to compute the whole value.
LARGEST_WHOLE = 2**28
# In bytes: the size of a block, if an initial value is computed block by block.
BLOCK_BYTES = 2**22


class Placement:
    """Chooses servers for variables. Thread-safe, but variables that other threads are creating are not counted yet.

    `devices` are the devices of the parameter servers; `variables` returns the existing variables.
    """

    def __init__(self, devices: Sequence[str], variables: Callable[[], Iterable[Any]]) -> None:
        self._devices = devices
        self._variables = variables
        # Counts variables and tables. `next` is atomic, so placement is round robin even with several threads.
        self._numbers = itertools.count()

    def next_devices(self, sizes: Sequence[int]) -> list[str]:
        """Returns the devices of new variables with these sizes in bytes, 0 if unknown."""
        held = dict.fromkeys(self._devices, 0)
        for variable in self._variables() if max(sizes) >= _LARGE else ():
            # The parts of a sharded variable are counted. The sharded variable itself has no value.
            if variable.device in held and not hasattr(variable, "parts"):
                held[variable.device] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return [self._next(size, held) for size in sizes]

    def _next(self, size: int, held: dict[str, int]) -> str:
        number = next(self._numbers) % len(self._devices)
        device = self._devices[number]
        # If several servers hold the fewest bytes, `min` returns the next of them in round-robin order.
        least = min((*self._devices[number:], *self._devices[:number]), key=held.__getitem__)
        if size >= _LARGE and held[device] + size > _TOLERATED * (held[least] + size):
            device = least
        held[device] += size
        return device


@dataclasses.dataclass(frozen=True)
class InitialValue:
    """An initial value that can be computed by rows; `shape` and `dtype` belong to the whole value.

    `rows` takes the first row and the number of rows, and returns these rows. `whole` is for a variable that is not
    sharded. Blocks of `block_rows` rows, which begin at multiples of this number, are computed one by one. None
    computes all requested rows in one call.
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
    """The initial value of `count` rows, written block by block: a server needs memory for the rows and one block.

    `initial` is the initial value of all rows of the variable. Its `block_rows` is not None.
    """

    def __init__(self, initial: InitialValue, first: int, count: int) -> None:
        self._initial, self._first, self._count = initial, first, count

    def __call__(self) -> tf.Tensor:
        """Returns memory for the rows; its content is undefined until `write`."""
        shape = [self._count, *self._initial.shape[1:]]
        return tf.raw_ops.Empty(shape=shape, dtype=self._initial.dtype, init=False)

    def write(self, variable: tf.Variable) -> None:
        """Writes all rows into a variable that has exactly these rows."""
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
    """Converts the initial value that the constructor of a variable got.

    `value` is a value, or a function that returns a value. A function that takes `partition_shape` and
    `partition_offset` returns only these rows, and is called for each block of a part. Any other function is called for
    each part, and the rows are taken from its result. If `shape` or `dtype` is None, a call of the function shows it.
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
    parameters = _parameters(function)
    if _names_partition(function) or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        # An initializer with **kwargs may still raise when it is called with these two arguments.
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
    """Returns rows of the whole value that a function returns; raises `ValueError` if the whole value is large."""
    size = shape.num_elements() * dtype.size
    if size > LARGEST_WHOLE:
        raise ValueError(
            f"The sharded variable {name!r} of shape {shape} cannot be created: its initial value can only be computed "
            f"as a whole, which would take {size / 2**20:,.0f} MB on each parameter server. Give it one of Keras' "
            "random or constant initializers, or shape=, dtype= and a function that takes partition_shape and "
            "partition_offset and returns these rows; or zeros, and assign its rows in steps."
        )
    return tf.convert_to_tensor(function(), dtype)[first : first + count]


def _names_partition(function: Callable[..., Any]) -> bool:
    return {"partition_shape", "partition_offset"} <= {argument.name for argument in _parameters(function)}


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


# A function that takes the shape and the dtype of a variable, and returns the number of partitions along each axis.
Partitioner = Callable[..., Sequence[int]]

_OPTIONS = ("synchronization", "aggregation", "distribute_strategy")


def check_partitioner(partitioner: Any) -> None:
    """Raises TypeError for objects that cannot be a partitioner."""
    if partitioner is not None and not callable(partitioner):
        raise TypeError(
            "variable_partitioner must be one of tf.distribute.experimental.partitioners or a function of shape and "
            f"dtype, got {partitioner!r}."
        )


def partition_by(partitioner: Partitioner, shape: tf.TensorShape, dtype: tf.DType) -> Partition | None:
    """Returns a partitioner's division of a variable; None if the variable stays whole.

    Raises `ValueError` if the partitioner divides other axes than the first, or returns nothing.
    """
    if not shape.rank or shape[0] is None or dtype in (tf.resource, tf.variant):
        return None
    counts = partitioner(shape=shape, dtype=dtype)
    if not counts or counts[0] == 0 or any(count != 1 for count in counts[1:]):
        raise ValueError(
            "variable_partitioner must return a list/tuple whose elements are 1 besides the first element (non-zero), "
            f"got: {counts!r}"
        )
    parts = min(int(counts[0]), shape[0])
    return Partition(shape[0], parts) if parts > 1 else None


def part_sizes(partition: Partition | None, initial: InitialValue) -> list[int]:
    """Returns the size of each part, or of the whole variable without a partition, in bytes; 0 if unknown."""
    if partition is None:
        return [(initial.shape.num_elements() or 0) * initial.dtype.size]
    row = (initial.shape[1:].num_elements() or 0) * initial.dtype.size
    return [rows * row for rows in partition.sizes]


def create_sharded(
    create_part: Callable[..., tf.Variable],
    partition: Partition,
    initial: InitialValue,
    devices: Sequence[str],
    arguments: dict[str, Any],
) -> ShardedVariable:
    """Creates a sharded variable from the `arguments` of a variable's constructor.

    `create_part` is called with the device and the arguments of each part.
    """
    name = arguments.get("name") or "Variable"
    parts = []
    for number, (first, count) in enumerate(zip(partition.offsets, partition.sizes, strict=True)):
        rows: Callable[[], Any] = RowsInBlocks(initial, first, count)
        # While a function is traced, rows are not written in blocks: each run of the function would write them.
        if initial.block_rows is None or initial.block_rows >= count or not tf.executing_eagerly():
            rows = functools.partial(initial.rows, first, count)
        own = {
            **arguments,
            "name": f"{name}/part_{number}",
            "shape": tf.TensorShape([count]).concatenate(initial.shape[1:]),
            "dtype": initial.dtype,
            "initial_value": rows,
            # Gradients belong to the whole variable.
            "trainable": False,
            "constraint": None,
        }
        parts.append(create_part(devices[number], **own))
    full_name = parts[0].name.removesuffix(":0").removesuffix("/part_0")
    if (trainable := arguments.get("trainable")) is None:
        trainable = arguments.get("synchronization") is not tf.VariableSynchronization.ON_READ
    return ShardedVariable(
        parts,
        full_name,
        trainable=trainable,
        constraint=arguments.get("constraint"),
        **{option: arguments[option] for option in _OPTIONS if arguments.get(option) is not None},
    )
