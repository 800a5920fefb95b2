"""Several replicas of a worker in one function that is being traced, with their devices, values and variables.

    the function  ----- run ----+-- thread of replica 0 --+-- merge_call --+-- thread of replica 0 --+--> PerReplica
                                `-- thread of replica 1 --'                `-- thread of replica 1 --'

One thread runs at a time, in the order of the replicas, until the thread calls `merge_call` or ends. A merge needs the
values of all replicas. All threads add operations to the function's graph, and end before `call_for_each_replica` does.

All operations run on the worker that has the replicas. A `PerReplica` value has a part for each replica. A variable is
read once for all replicas, and changed once. As in `tf.distribute`, the variable's `aggregation` selects the value of
the change: the replicas' sum (`SUM`), their mean (`MEAN`), or the value of the first replica (`ONLY_FIRST_REPLICA`).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, mirrored_run, values
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from coordinator.ps_strategy.tensorflow_internals.shared_variable import change_of, value_read_before, with_mixin

# Private: the public base of these classes, `tf.distribute.DistributedValues`, cannot be created.
PerReplica = values.PerReplica
PerReplicaSpec = values.PerReplicaSpec

_AGGREGATION = tf.VariableAggregation
_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
_SCATTERS = ("add", "div", "max", "min", "mul", "sub", "update", "nd_add", "nd_max", "nd_min", "nd_sub", "nd_update")


def regrouped(parts: Sequence[Any]) -> Any:
    """Combines the values of all replicas, which have equal structures, into one structure of `PerReplica` values."""
    # Private: no public function creates `PerReplica` values.
    return distribute_utils.regroup(tuple(parts), always_wrap=True)


def parts_of_replicas(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a `PerReplica` value; any other value is its only part."""
    return tuple(value.values) if isinstance(value, PerReplica) else (value,)


def map_replica_values(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies a function to the leaves of a structure; a `PerReplica` value is a leaf."""
    return tf.nest.map_structure(function, structure)


def part_of(replica: int, structure: Any) -> Any:
    """Returns a structure with the part of one replica in place of each `PerReplica` value."""
    return map_replica_values(
        lambda value: value.values[replica] if isinstance(value, PerReplica) else value, structure
    )


def reduced(reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
    """Combines the parts of a `PerReplica` value, dense tensors or `tf.IndexedSlices`, by `SUM` or `MEAN`.

    Returns a tensor, or `tf.IndexedSlices` that have each index once. A value that is not `PerReplica` is returned
    unchanged, but the sum of a value other than 0 is a ValueError.
    """
    if not isinstance(value, tf.distribute.DistributedValues):
        if reduce_op is _SUM and not (isinstance(value, int | float) and value == 0):
            raise ValueError(
                f"strategy.reduce was to sum {value!r}, which is the same for all replicas of a worker. It sums what "
                "strategy.run returns; use tf.distribute.ReduceOp.MEAN, or the value itself."
            )
        return value
    parts = parts_of_replicas(value)

    def of_sum(summed: Any) -> Any:
        if reduce_op is _SUM:
            return summed
        is_exact = summed.dtype.is_floating or summed.dtype.is_complex
        return summed / len(parts) if is_exact else summed // len(parts)

    if not isinstance(parts[0], tf.IndexedSlices):
        return of_sum(tf.add_n(list(map(tf.convert_to_tensor, parts))))
    indices, places = tf.unique(tf.concat([part.indices for part in parts], 0))
    rows = tf.math.unsorted_segment_sum(tf.concat([part.values for part in parts], 0), places, tf.size(indices))
    return tf.IndexedSlices(of_sum(rows), indices, parts[0].dense_shape)


def total(parts: Sequence[Any]) -> Any:
    """Returns the sum of the gradients of all replicas for a variable; None if the first replica has no gradient."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return reduced(_SUM, PerReplica(tuple(parts)))


def common_part(value: Any, name: str) -> Any:
    """Returns a value that is the same in all replicas, such as a gradient after `all_reduce`.

    Raises ValueError, with the `name` of the variable, if the replicas' parts may differ.
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
    value = value.values if isinstance(value, tf.IndexedSlices) else value
    while tf.is_symbolic_tensor(value) and value.op.type in ("Identity", "IdentityN"):
        value = value.op.inputs[value.value_index]
    return value


def concatenated(value: Any, axis: int) -> Any:
    """Returns the parts of a `PerReplica` value as one tensor, along an axis; any other value unchanged."""
    parts = list(parts_of_replicas(value))
    if len(parts) == 1:
        return parts[0]
    return tf.sparse.concat(axis, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, axis)


def divided(batch: Any, replicas: int) -> Any:
    """Divides the rows of batches among replicas as evenly as possible; the first parts may have one more row.

    `batch` nests dense, ragged or sparse tensors with examples on the first axis, and None. A scalar is a ValueError.
    """

    def parts(tensor: Any) -> Any:
        if tensor is None or isinstance(tensor, PerReplica):
            return tensor
        if tensor.shape.rank == 0:
            raise ValueError(
                f"A batch is divided among the {replicas} devices of a worker, by its first axis; {tensor} has none. "
                "Batch the dataset, or create it by a function, each of whose elements is for one device."
            )
        rows = tf.cast(_row_count(tensor), tf.int64) if tensor.shape[0] is None else tensor.shape[0]
        bounds = [(rows * number + replicas - 1) // replicas for number in range(replicas + 1)]
        return PerReplica(tuple(_rows(tensor, *between) for between in itertools.pairwise(bounds)))

    return tf.nest.map_structure(parts, batch)


def first_part_spec(spec: Any) -> Any:
    """Returns a structure of types with the type of the first replica's part in place of each `PerReplicaSpec`."""
    # Private: a `PerReplicaSpec` has no public attribute.
    return tf.nest.map_structure(
        lambda leaf: leaf._component_specs[0] if isinstance(leaf, PerReplicaSpec) else leaf, spec
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


def is_one_of_several() -> bool:
    """Returns True in a replica of `call_for_each_replica`."""
    # Private: the context of one of several replicas has no public class.
    return isinstance(tf.distribute.get_replica_context(), mirrored_run._MirroredReplicaContext)


def call_for_each_replica(
    strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], devices: Sequence[str]
) -> Any:
    """Calls a function once for each replica, in the function that is being traced.

    Args:
      strategy: the strategy, with `num_replicas_in_sync` replicas.
      fn: the function. It gets the replica's part of each `PerReplica` argument, in a replica context. If it is a
        `tf.function`, its operations are added to the graph as for a Python function.
      args: the positional arguments of `fn`.
      kwargs: the keyword arguments of `fn`.
      devices: a device for each replica. An operation that uses a resource is placed with the resource instead.

    Returns:
      The result of `fn`, in the same structure, with `PerReplica` values in place of tensors.

    Raises:
      RuntimeError: the replicas make different numbers of merge calls, or a merge call in a nested function or branch.
    """
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
        status = tf.__internal__.autograph.control_status_ctx()
        fn = tf.__internal__.autograph.tf_convert(fn.python_function, status)

    def own(value: Any) -> Any:
        return tf.nest.map_structure(tf.identity, value, expand_composites=True) if tf.is_tensor(value) else value

    @tf.autograph.experimental.do_not_convert
    def on_its_device(*replica_args: Any, **replica_kwargs: Any) -> Any:
        # Private: the public id of the replica is a tensor.
        device = devices[tf.distribute.get_replica_context()._replica_id_in_sync_group]

        def placed(operation: Any) -> str:
            is_placed = operation.device or any(tensor.dtype == tf.resource for tensor in operation.inputs)
            return str(operation.device) if is_placed else device

        with tf.device(None), tf.compat.v1.device(placed):
            # `own` adds identities, so that values that are the same in all replicas become `PerReplica`, too.
            return tf.nest.map_structure(own, fn(*replica_args, **replica_kwargs))

    # Private: `merge_call` needs a thread for each replica, and no public class has threads.
    return mirrored_run.call_for_each_replica(strategy, on_its_device, args, kwargs)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A scope in which a replica reads and changes variables by itself, as if it were another worker."""
    if not is_one_of_several():
        yield
        return
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0):
        yield


def apply_once(function: Callable[[Any], object], gradient: Any) -> None:
    """Calls a function that changes a variable by a gradient. Replicas call it once, with the sum of the gradients."""
    if not is_one_of_several():
        function(gradient)
        return

    def merged(_: tf.distribute.Strategy, gradients: Any) -> None:
        function(reduced(_SUM, gradients))

    tf.distribute.get_replica_context().merge_call(merged, args=(gradient,))


def refuse_replica(what: str) -> None:
    """Raises RuntimeError in one of several replicas, which would all do `what`."""
    if is_one_of_several():
        raise RuntimeError(
            f"{what} is used once for all devices of a worker, and was called on each. Call it in the scheduled "
            "function, around strategy.run or after it, with gradients that strategy.reduce has summed."
        )


def make_replicated(variable: Any, *, is_keras: bool) -> None:
    """Changes the class of a variable, so that replicas of a worker share its reads and aggregate its changes.

    As in TensorFlow, replicas may not change a variable without an aggregation, except Keras's own variables
    (`is_keras`), as in `BatchNormalization`. A floating-point variable of Keras becomes the mean of the values that the
    replicas assign. An integer variable is changed by one replica after the other, such as the state of a seed, from
    which each replica draws other numbers. Replicas' additions to a weight are refused.
    """
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        kind: Any = type(variable)
        variable.__class__ = with_mixin(_Replicated, kind)
        variable.is_of_keras = is_keras


class _Replicated:
    """The mixin of `make_replicated`. Outside of replicas, and within `alone`, it calls the variable's own methods."""

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Assigns a value; arguments and result are the same as for `tf.Variable.assign`."""
        return _change(self, "assign", value, super().assign, use_locking, name, read_value)  # type: ignore[misc]

    def assign_add(self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        return _change(self, "assign_add", delta, super().assign_add, use_locking, name, read_value)  # type: ignore[misc]

    def assign_sub(self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        return _change(self, "assign_sub", delta, super().assign_sub, use_locking, name, read_value)  # type: ignore[misc]

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        # Private: every way to read a whole value calls this method.
        before = value_read_before(self) if is_one_of_several() else None
        if before is None:
            return super()._read_variable_op(no_copy)  # type: ignore[misc]
        variable: Any = self
        resource_variable_ops.variable_accessed(variable)
        if not record.should_record_backprop([variable.handle]):
            return before
        value = tf.identity(before)
        # The tape of this replica has not recorded the earlier read.
        record.record_operation("ReadVariableOp", [value], [variable.handle], lambda gradient: [gradient])
        return value


@tf.autograph.experimental.do_not_convert
def _change(variable: Any, method: str, value: Any, alone: Callable[..., Any], *rest: Any) -> Any:
    if not is_one_of_several():
        return alone(value, *rest)
    value = tf.convert_to_tensor(value, variable.dtype)
    added = _added(variable, value) if method == "assign" else None
    aggregation = variable.aggregation
    if aggregation == _AGGREGATION.NONE:
        is_addition = method != "assign" or added is not None
        # A replica's addition to a weight is a part of a gradient. Only the program knows how to combine these parts.
        if not variable.is_of_keras or (variable.trainable and is_addition):
            raise ValueError(
                f"Several replicas of a worker call {method} of the variable {variable.name!r}, which was created "
                "without an aggregation. Create it with aggregation=tf.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or change it outside of strategy.run, by what strategy.reduce returns."
            )
        if not variable.dtype.is_floating:
            alone(value, *rest)
            return variable
        aggregation = _AGGREGATION.MEAN

    def merged(strategy: tf.distribute.Strategy, values: Any, all_added: Any) -> Any:
        name, amounts = method, values
        if method == "assign":
            if None not in parts_of_replicas(all_added):
                name, amounts = "assign_add", all_added
            elif aggregation == _AGGREGATION.SUM and variable.is_of_keras:
                raise ValueError(
                    f"A replica assigned a value to {variable.name!r} that is not its value plus something, so it "
                    "cannot be said what the sum over the replicas is to be. Write it as variable.assign(variable + "
                    "change)."
                )
        if aggregation == _AGGREGATION.ONLY_FIRST_REPLICA or len(parts_of_replicas(amounts)) == 1:
            amount = parts_of_replicas(amounts)[0]
        else:
            amount = reduced(_SUM if aggregation == _AGGREGATION.SUM else _MEAN, amounts)
        return strategy.extended.update(variable, lambda own: getattr(own, name)(amount, read_value=False))

    # Each replica passes an identity, because a tensor that is the same in all replicas would not be `PerReplica`.
    tf.distribute.get_replica_context().merge_call(merged, args=(tf.identity(value), added))
    return variable


def _added(variable: Any, value: Any) -> Any | None:
    """Returns the amount that an assignment adds to a variable; None if the assignment is not an addition."""
    change = change_of(variable, value)
    return None if change is None else tf.identity(change[1]) if change[0] else tf.negative(change[1])


def _scatter_method(name: str) -> Callable[..., Any]:
    is_sum = name.endswith(("add", "sub"))

    def scatter(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(super(_Replicated, self), name)
        if not is_one_of_several() or (is_sum and self.aggregation == _AGGREGATION.SUM):
            return stock(*args, **kwargs)
        raise ValueError(
            f"Several replicas of a worker call {name} of the variable {self.name!r}. In a replica only additions to "
            "rows can be aggregated, of a variable with aggregation=tf.VariableAggregation.SUM; make other changes "
            "outside of strategy.run."
        )

    return scatter


for _name in (*(f"scatter_{scatter}" for scatter in _SCATTERS), "batch_scatter_update"):
    setattr(_Replicated, _name, _scatter_method(_name))
