"""Creates variables in parts, each with its rows of the initial value, on its parameter server."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.sharded.initial_values import InitialValue, RowsInBlocks
from coordinator.ps_strategy.sharded.partition import Partition
from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable

# Called with the shape and the dtype of a variable, returns the number of partitions along each axis.
Partitioner = Callable[..., Sequence[int]]

# Arguments of a variable that concern it as a whole.
_OPTIONS = ("synchronization", "aggregation", "distribute_strategy")


def check_partitioner(partitioner: Any) -> None:
    """Raises TypeError for what cannot be a partitioner."""
    if partitioner is not None and not callable(partitioner):
        raise TypeError(
            "variable_partitioner must be one of tf.distribute.experimental.partitioners or a function of shape and "
            f"dtype, got {partitioner!r}."
        )


def partition_by(partitioner: Partitioner, shape: tf.TensorShape, dtype: tf.DType) -> Partition | None:
    """Returns how a partitioner divides a variable; None for one that stays whole.

    Raises:
      ValueError: the partitioner divides other axes than the first, or returns nothing.
    """
    if not shape.rank or shape[0] is None or dtype in (tf.resource, tf.variant):
        return None
    found = partitioner(shape=shape, dtype=dtype)
    if not found or found[0] == 0 or any(count != 1 for count in found[1:]):
        raise ValueError(
            "variable_partitioner must return a list/tuple whose elements are 1 besides the first element (non-zero), "
            f"got: {found!r}"
        )
    parts = min(int(found[0]), shape[0])
    return Partition(shape[0], parts) if parts > 1 else None


def part_sizes(partition: Partition | None, initial: InitialValue) -> list[int]:
    """Returns the size of each part in bytes; of the whole variable if there is no partition, 0 if it is not known."""
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
    """Creates a sharded variable.

    Args:
      create_part: called with a device and the arguments of a variable, creates a variable there.
      partition: which rows are in which part.
      initial: the initial value.
      devices: of each part.
      arguments: those of the constructor of the whole variable.
    """
    name = arguments.get("name") or "Variable"
    parts = []
    for number, (first, count) in enumerate(zip(partition.offsets, partition.sizes, strict=True)):
        own = {
            **arguments,
            "name": f"{name}/part_{number}",
            "shape": tf.TensorShape([count]).concatenate(initial.shape[1:]),
            "dtype": initial.dtype,
            "initial_value": _initial_rows(initial, first, count),
            # Gradients are those of the whole variable.
            "trainable": False,
            "constraint": None,
        }
        parts.append(create_part(devices[number], **own))
    full_name = parts[0].name.removesuffix(":0").removesuffix("/part_0")
    trainable = arguments.get("trainable")
    return ShardedVariable(
        parts,
        full_name,
        trainable=arguments.get("synchronization") is not tf.VariableSynchronization.ON_READ
        if trainable is None
        else trainable,
        constraint=arguments.get("constraint"),
        **{option: arguments[option] for option in _OPTIONS if arguments.get(option) is not None},
    )


def _initial_rows(initial: InitialValue, first: int, count: int) -> Callable[[], Any]:
    # A function that is being traced would write them whenever it runs.
    if initial.block_rows is None or initial.block_rows >= count or not tf.executing_eagerly():
        return functools.partial(initial.rows, first, count)
    return RowsInBlocks(initial, first, count)
