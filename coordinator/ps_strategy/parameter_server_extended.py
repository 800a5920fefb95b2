"""The hooks that TensorFlow calls on a strategy: where variables are placed, how functions run in a replica.

Each computing device of a worker is a replica. Workers do not wait for each other, so `num_replicas_in_sync` is the
number of devices of one worker, and reductions combine the values of these devices. On one device, a scheduled function
runs in the replica context; on several, in the cross-replica context, where `run` calls a function on each device.

Variables are on the CPUs of the parameter servers. An optimizer updates a variable and its slots on their server: the
worker sends the gradient to the server.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.calls.client_functions import ClientFunctions
from coordinator.ps_strategy.calls.read_ahead import ReadAhead
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.keras.internals.initial_values import initial_value_of_keras
from coordinator.ps_strategy.keras.internals.patches import is_state_of_sequences
from coordinator.ps_strategy.per_worker.resource import (
    create_per_worker_variable,
    create_state_of_sequences,
    table_creator_scopes,
)
from coordinator.ps_strategy.sharded.creation import (
    Partitioner,
    Placement,
    RowsInBlocks,
    create_sharded,
    initial_value_of,
    part_sizes,
    partition_by,
)
from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable
from coordinator.ps_strategy.strategy_parts import StrategyParts
from coordinator.ps_strategy.tensorflow_internals.handles import (
    KINDS,
    create_mutable_table,
    is_created_by_keras,
    resource_creator_scope,
)
from coordinator.ps_strategy.tensorflow_internals.replicas import (
    call_for_each_replica,
    common_part,
    concatenated,
    is_one_of_several,
    make_replicated,
    map_replica_values,
    part_of,
    parts_of_replicas,
    reduced,
    regrouped,
)
from coordinator.ps_strategy.tensorflow_internals.shared_variable import make_shared

_logger = logging.getLogger("coordinator")


class ParameterServerExtended(tf.compat.v1.distribute.StrategyExtended):
    """The hooks of `tf.distribute.StrategyExtended` for `ParameterServerStrategy`.

    The base class is from `tf.compat.v1`: only this version has `call_for_each_replica`, which `Strategy.run` calls.
    Variables and tables that are created in the scope are registered in `parts`, which other folders use as `services`.
    """

    client_functions: ClientFunctions

    def __init__(
        self, strategy: tf.distribute.Strategy, parts: StrategyParts, partitioner: Partitioner | None = None
    ) -> None:
        super().__init__(strategy)
        self.services = parts
        self._parameter_server_devices = tuple(f"{server.device}/device:CPU:0" for server in parts.parameter_servers)
        self._handles = parts.handles
        self._variables = parts.variables
        self._read_on_all = parts.copies.read
        self._lost_parameter_server = parts.scheduler.servers.lost_parameter_server
        self._partitioner = partitioner
        self._placement = Placement(self._parameter_server_devices, self._variables.variables)
        self._scheduling = threading.local()
        self._has_warned_of_states = False
        self._worker_devices = parts.worker_devices
        # A function is traced once for all workers, not for each device that it may run on.
        self._retrace_functions_for_each_device = False

    @contextlib.contextmanager
    def scheduled_tracing(self) -> Iterator[None]:
        """Enters the scope in which scheduled functions are traced. In this scope, `run` and `reduce` do not warn."""
        strategy = self._container_strategy()
        self._scheduling.depth = getattr(self._scheduling, "depth", 0) + 1
        # If workers have several devices, the function is traced in the cross-replica context, and may call `run`.
        replica = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=0)
        try:
            with strategy.scope(), contextlib.nullcontext() if self._has_several_replicas else replica:
                yield
        finally:
            self._scheduling.depth -= 1

    def on_client(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Adds a call of the strategy's method `verb` to the client's function that is being traced."""
        if getattr(self._scheduling, "depth", 0):
            raise RuntimeError(
                f"strategy.{verb} was called in a function that is scheduled, and runs on a worker. Functions are "
                "scheduled and awaited on the client: in the program, or in a tf.function that the program calls."
            )
        functions = self.client_functions
        # `do_not_convert`, because AutoGraph would convert the code of this library too.
        with tf.device(None), tf.device(functions.device):
            return tf.autograph.experimental.do_not_convert(getattr(functions, verb))(*args, **kwargs)

    def read_ahead(self, read: Callable[[Any], Any], slots: int) -> ReadAhead:
        return ReadAhead(read, slots, self._trace)

    def trace_dataset(self, make_dataset: Callable[[], tf.data.Dataset]) -> TracedFunction:
        """Traces a function that creates a dataset, in the strategy's scope."""
        return self._trace(tf.function(make_dataset), ())

    def _trace(self, function: Any, types: tuple[Any, ...]) -> TracedFunction:
        with self._container_strategy().scope():
            return TracedFunction(function.get_concrete_function(*types), self._handles)

    def warn_unless_scheduled(self, verb: str) -> None:
        """Logs a warning that `verb` runs on the client, unless a scheduled function is being traced."""
        if not getattr(self._scheduling, "depth", 0):
            _logger.warning(
                "strategy.%s was called outside of a scheduled function and runs on the client, not on a worker. Call "
                "it inside a tf.function that you give to strategy.schedule.",
                verb,
            )

    def across_replicas(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a cross-replica method of `tf.distribute.Strategy`, also if the caller is in a replica context."""
        replica = self.replica_context()
        if replica is None or self._has_several_replicas:
            return method(self._container_strategy(), *args)
        return replica.merge_call(method, args=args)

    def replica_context(self) -> tf.distribute.ReplicaContext | None:
        replica = tf.distribute.get_replica_context()
        return replica if replica is not None and replica.strategy is self._container_strategy() else None

    def holds(self, variable: tf.Variable) -> bool:
        """Returns True if workers can use a variable: it is on a parameter server, or each worker has a copy."""
        on_server = any(variable.device == device for device in self._parameter_server_devices)
        return on_server or self._handles.resource_for(variable.handle) is not None

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with self._losses_named():
            return self._create_by_kind(next_creator, kwargs)

    @contextlib.contextmanager
    def _losses_named(self) -> Iterator[None]:
        """Raises an error that names the lost parameter server in place of TensorFlow's error, if one is lost."""
        try:
            yield
        except tf.errors.OpError as error:
            if (lost := self._lost_parameter_server()) is None:
                raise
            lost.original_exception = error
            _logger.debug("TensorFlow's error while a variable or table was created:", exc_info=error)
            raise lost from None

    def _create_by_kind(self, next_creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        if kwargs.pop("per_worker_variable", False):
            return create_per_worker_variable(lambda: next_creator(**kwargs), self._handles, self._read_on_all)
        if is_state_of_sequences():
            self._warn_of_states()
            return create_state_of_sequences(lambda: next_creator(**kwargs), self._handles, self._read_on_all)
        beside = kwargs.get("colocate_with")
        create = functools.partial(self._create_on, next_creator)
        may_be_divided = self._partitioner is not None if beside is None else isinstance(beside, ShardedVariable)
        # A SavedModel creates variables without initial values. The functions of a SavedModel need whole variables.
        if may_be_divided and kwargs.get("initial_value") is not None:
            return self._create_partitioned(create, beside, kwargs)
        device = self._placement.next_devices([self._known_size(kwargs)])[0] if beside is None else str(beside.device)
        return create(device, **kwargs)

    def _warn_of_states(self) -> None:
        if not self._has_warned_of_states:
            self._has_warned_of_states = True
            _logger.warning(
                "A layer has stateful=True: each worker has a state of its own, with which its next batch begins. Run "
                "all batches of a sequence on one worker, by schedule(..., worker=) or by a dataset function."
            )

    def _known_size(self, kwargs: dict[str, Any]) -> int:
        """Returns the size in bytes of a variable with these arguments; 0 if the size is unknown."""
        value = kwargs.get("initial_value")
        shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
        if shape is None or dtype is None:
            known: Any = initial_value_of_keras(value) or value
            shape, dtype = getattr(known, "shape", None), getattr(known, "dtype", None)
        if shape is None or dtype is None:
            return 0
        return (tf.TensorShape(shape).num_elements() or 0) * tf.as_dtype(dtype).size

    def _create_partitioned(self, create: Callable[..., Any], beside: Any, kwargs: dict[str, Any]) -> Any:
        """Creates a variable that is divided like the variable `beside`, or by the partitioner if `beside` is None."""
        value, *rest = (kwargs.get(argument) for argument in ("initial_value", "shape", "dtype", "name"))
        with tf.device(None), tf.device(self._parameter_server_devices[0]):
            initial = initial_value_of_keras(value) or initial_value_of(value, *rest)
        if beside is None:
            assert self._partitioner is not None
            partition = partition_by(self._partitioner, initial.shape, initial.dtype)
            devices = self._placement.next_devices(part_sizes(partition, initial))
        else:
            has_its_rows = initial.shape.rank and initial.shape[0] == beside.shape[0]
            partition = beside.partition if has_its_rows else None
            devices = [part.device for part in beside.parts]
        if partition is None:
            return create(devices[0], again=value, **{**kwargs, "initial_value": initial.whole})
        variable = create_sharded(create, partition, initial, devices, kwargs)
        # The parts have their own initial values. The sharded variable's handle, without a value, may be lost too.
        self._variables.add(variable, None)
        return variable

    def _create_on(self, next_creator: Callable[..., Any], device: str, again: Any = None, **kwargs: Any) -> Any:
        """Creates a variable on `device`. A recovery assigns `again` to it, or `initial_value` if `again` is None."""
        with tf.device(None), tf.device(device):
            variable = next_creator(**kwargs)
            if isinstance(value := kwargs.get("initial_value"), RowsInBlocks):
                value.write(variable)
        make_shared(variable)
        if self._has_several_replicas:
            make_replicated(variable, is_keras=is_created_by_keras())
        self._variables.add(variable, kwargs.get("initial_value") if again is None else again)
        return variable

    def _resource_creator_scope(self) -> Sequence[Any]:
        mutable = [resource_creator_scope(kind, self._create_table) for kind in KINDS]
        return [*table_creator_scopes(self._handles), *mutable]

    def _create_table(self, next_creator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A table that is created while a function is traced is part of that function.
        if not tf.executing_eagerly() or is_created_by_keras():
            return next_creator(*args, **kwargs)
        with self._losses_named():
            table, resource = create_mutable_table(next_creator, self._placement.next_devices([0])[0], args, kwargs)
        self._variables.add_table(table, resource)
        return table

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, tf.Variable):
            raise ValueError(f"colocate_vars_with takes a tf.Variable, got {colocate_with_variable!r}.")

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.warn_unless_scheduled("run")
        if self._has_several_replicas:
            if tf.executing_eagerly():
                raise RuntimeError(
                    f"strategy.run was called on the client, and the replicas are the {len(self._worker_devices)} "
                    "devices of each worker. Call it inside a tf.function that you give to strategy.schedule."
                )
            return call_for_each_replica(self._container_strategy(), fn, args, kwargs, self._worker_devices)
        with tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **kwargs)

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], group: bool
    ) -> Any:
        if self._has_several_replicas:
            first = [common_part(gradient, var.name) for gradient in args[:1]]
            args, kwargs = part_of(0, ((*first, *args[1:]), dict(kwargs)))
        # A per-worker variable has the client's device, but is updated where the function runs. The update of a sharded
        # variable is split into updates of its parts.
        is_split = isinstance(var, ShardedVariable) or self._handles.resource_for(var.handle)
        with tf.device(None if is_split else var.device):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not self._has_several_replicas:
            return value
        return map_replica_values(functools.partial(reduced, reduce_op), value)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return concatenated(value, axis)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        count = self._num_replicas_in_sync
        contexts = [tf.distribute.experimental.ValueContext(number, count) for number in range(count)]
        values = [value_fn(context) for context in contexts]
        return regrouped(values) if self._has_several_replicas else values[0]

    def _local_results(self, val: Any) -> tuple[Any, ...]:
        return parts_of_replicas(val)

    def value_container(self, value: Any) -> Any:
        """Returns the value itself: no variable has a part for each replica."""
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return replica_id

    def _use_merge_call(self) -> bool:
        # In the cross-replica context the caller has reduced the gradients: an optimizer applies them unchanged.
        return is_one_of_several()

    @property
    def _has_several_replicas(self) -> bool:
        return len(self._worker_devices) > 1

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._worker_devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of a worker's replicas, with names relative to the worker."""
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self._parameter_server_devices

    def _in_multi_worker_mode(self) -> bool:
        return False

    @property
    def should_checkpoint(self) -> bool:
        """The client writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """The client writes summaries."""
        return True
