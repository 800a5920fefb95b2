"""Values with a part for each replica of a worker: `PerReplica`, and how they are made, taken apart and combined.

All is done on the worker that has the replicas, in the function that uses them.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

# Private: `tf.distribute.DistributedValues` is their public base, which cannot be created.
PerReplica = values.PerReplica
PerReplicaSpec = values.PerReplicaSpec


def regrouped(parts: Sequence[Any]) -> Any:
    """Returns values of all replicas, with the same structure, as one structure with `PerReplica` values."""
    # Private: as above.
    return distribute_utils.regroup(tuple(parts), always_wrap=True)


def parts_of_replicas(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a `PerReplica` value; any other value is the only one."""
    return tuple(value.values) if isinstance(value, PerReplica) else (value,)


def part_of(replica: int, structure: Any) -> Any:
    """Returns a structure with the part of one replica in place of `PerReplica` values."""
    return map_replica_values(
        lambda value: value.values[replica] if isinstance(value, PerReplica) else value, structure
    )


def map_replica_values(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies a function to the leaves of a structure; a `PerReplica` value is one."""
    return tf.nest.map_structure(function, structure)


def reduced(reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
    """Combines the parts of a `PerReplica` value.

    Args:
      reduce_op: `SUM` or `MEAN`.
      value: a `PerReplica` of dense tensors, or of `tf.IndexedSlices`.

    Returns:
      A tensor; or `tf.IndexedSlices` that have each index once.

    Raises:
      ValueError: the sum of a value is wanted that is not `PerReplica`; of 0 it is 0.
    """
    if not isinstance(value, tf.distribute.DistributedValues):
        if reduce_op is tf.distribute.ReduceOp.SUM and not (isinstance(value, int | float) and value == 0):
            raise ValueError(
                f"strategy.reduce was to sum {value!r}, which is the same for all replicas of a worker. It sums what "
                "strategy.run returns; use tf.distribute.ReduceOp.MEAN, or the value itself."
            )
        return value
    parts = parts_of_replicas(value)
    if isinstance(parts[0], tf.IndexedSlices):
        return _reduced_rows(reduce_op, parts)
    found = tf.add_n(list(map(tf.convert_to_tensor, parts)))
    return found if reduce_op is tf.distribute.ReduceOp.SUM else _divided_by(found, len(parts))


def total(parts: Sequence[Any]) -> Any:
    """Returns the sum of the gradients of all replicas for a variable; None if the first has none."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return reduced(tf.distribute.ReduceOp.SUM, PerReplica(tuple(parts)))


def aggregated(value: Any, aggregation: tf.VariableAggregation) -> Any:
    """Returns what a variable with an aggregation is changed by if the replicas give a `PerReplica` value."""
    parts = parts_of_replicas(value)
    if len(parts) == 1 or aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return parts[0]
    is_sum = aggregation == tf.VariableAggregation.SUM
    return reduced(tf.distribute.ReduceOp.SUM if is_sum else tf.distribute.ReduceOp.MEAN, value)


def common_part(value: Any, name: str) -> Any:
    """Returns a value that is the same in all replicas, such as a gradient after `all_reduce`.

    Args:
      value: a `PerReplica`, or a value that is not.
      name: of the variable that it is to change, for the error.

    Raises:
      ValueError: it is not known to be the same.
    """
    parts = parts_of_replicas(value)
    if len({id(_origin(part)) for part in parts}) > 1:
        raise ValueError(
            f"The variable {name!r}, of which there is one for all replicas, was to be updated with a value that "
            "differs between the replicas of a worker. Combine it first, with "
            "tf.distribute.get_replica_context().all_reduce."
        )
    return parts[0]


def _origin(value: Any) -> Any:
    """Returns the tensor of which a value is a copy."""
    value = value.values if isinstance(value, tf.IndexedSlices) else value
    while tf.is_symbolic_tensor(value) and value.op.type in ("Identity", "IdentityN"):
        value = value.op.inputs[value.value_index]
    return value


def _divided_by(value: Any, count: int) -> Any:
    return value / count if value.dtype.is_floating or value.dtype.is_complex else value // count


def _reduced_rows(reduce_op: tf.distribute.ReduceOp, parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    indices, places = tf.unique(tf.concat([part.indices for part in parts], 0))
    rows = tf.math.unsorted_segment_sum(tf.concat([part.values for part in parts], 0), places, tf.size(indices))
    if reduce_op is tf.distribute.ReduceOp.MEAN:
        rows = _divided_by(rows, len(parts))
    return tf.IndexedSlices(rows, indices, parts[0].dense_shape)


def concatenated(value: Any, axis: int) -> Any:
    """Returns the parts of a `PerReplica` value as one tensor, along an axis; any other value as it is."""
    parts = parts_of_replicas(value)
    if len(parts) == 1:
        return parts[0]
    join = tf.sparse.concat if isinstance(parts[0], tf.SparseTensor) else None
    return join(axis, list(parts)) if join else tf.concat(list(parts), axis)


def divided(batch: Any, replicas: int) -> Any:
    """Divides batches by rows, as evenly as their number allows; the first parts have more of them.

    Args:
      batch: nested dense, ragged or sparse tensors with examples along the first axis; None for what is not there.
      replicas: the number of parts.

    Raises:
      ValueError: a tensor is a scalar.
    """

    def parts(tensor: Any) -> Any:
        if tensor is None or isinstance(tensor, PerReplica):
            return tensor
        if tensor.shape.rank == 0:
            raise ValueError(
                f"A batch is divided among the {replicas} devices of a worker, by its first axis; {tensor} has none. "
                "Batch the dataset, or create it by a function, each of whose elements is for one device."
            )
        size = tensor.shape[0]
        rows = tf.cast(_row_count(tensor), tf.int64) if size is None else size
        bounds = [(rows * number + replicas - 1) // replicas for number in range(replicas + 1)]
        return PerReplica(tuple(_rows(tensor, *between) for between in itertools.pairwise(bounds)))

    return tf.nest.map_structure(parts, batch)


def first_part_spec(spec: Any) -> Any:
    """Returns the type of the first replica's part of values of a type, in the same structure."""
    # Private: a `PerReplicaSpec` has no public attribute.
    return tf.nest.map_structure(
        lambda each: each._component_specs[0] if isinstance(each, PerReplicaSpec) else each, spec
    )


def _row_count(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tensor.nrows() if isinstance(tensor, tf.RaggedTensor) else tf.shape(tensor, tf.int64)[0]


def _rows(tensor: Any, first: Any, end: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[first:end]
    start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros([tensor.shape.rank - 1], tf.int64)], 0)
    size = tf.concat([[tf.cast(end - first, tf.int64)], tensor.dense_shape[1:]], 0)
    return tf.sparse.slice(tensor, start, size)
