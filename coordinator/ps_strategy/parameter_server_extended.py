"""What TensorFlow asks of a strategy: where variables go, how a function runs in a replica, how updates are made.

One worker is one replica, and no replica waits for another: `num_replicas_in_sync` is 1 and reductions are over one
value. Variables are on the parameter servers' CPUs, and so are the updates of an optimizer: a gradient is pushed, the
variable and its slots stay where they are.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource
from coordinator.ps_strategy.per_worker_table import table_creator_scopes
from coordinator.ps_strategy.per_worker_variable import create_per_worker_variable
from coordinator.ps_strategy.recovery.variable_store import VariableStore

_logger = logging.getLogger("coordinator")


class ParameterServerExtended(tf.compat.v1.distribute.StrategyExtended):
    """The hooks of `ParameterServerStrategy`; their names and meanings are `tf.distribute.StrategyExtended`'s.

    The base is the version 1 class because it alone has `call_for_each_replica`, which `Strategy.run` calls.

    Args:
      strategy: the strategy that this belongs to.
      parameter_server_devices: the devices of the parameter servers, by index.
      handles: told about each table and per-worker variable that is made in the scope.
      variables: told about each other variable that is made in the scope.
      read_on_all: reads a per-worker resource on every worker.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        parameter_server_devices: Sequence[str],
        handles: PerWorkerHandles,
        variables: VariableStore,
        read_on_all: Callable[[PerWorkerResource], list[Any]],
    ) -> None:
        super().__init__(strategy)
        self._parameter_server_devices = tuple(f"{device}/device:CPU:0" for device in parameter_server_devices)
        self._handles = handles
        self._variables = variables
        self._read_on_all = read_on_all
        # Taking the next number is atomic, so that threads that make variables at once still go round robin.
        self._variable_numbers = itertools.count()
        self._scheduling = threading.local()
        # A function is traced once for all workers, whichever device it will run on.
        self._retrace_functions_for_each_device = False

    def scheduled_tracing(self) -> "_ScheduledTracing":
        """A scope in which a function is traced that was scheduled: `run` and `reduce` are at home in it."""
        return _ScheduledTracing(self._scheduling)

    def warn_unless_scheduled(self, verb: str) -> None:
        """Warns that `verb` would run on the client."""
        if not getattr(self._scheduling, "depth", 0):
            _logger.warning(
                "strategy.%s was called outside of a scheduled function and runs on the client, not on a worker. Call "
                "it inside a tf.function that you give to strategy.schedule.",
                verb,
            )

    def holds(self, variable: tf.Variable) -> bool:
        """Whether workers can use a variable: it is on a parameter server, or each of them has one of its own."""
        on_server = any(variable.device == device for device in self._parameter_server_devices)
        return on_server or self._handles.resource_for(variable.handle) is not None

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.pop("per_worker_variable", False):
            # An optimizer wants its slots with their variable. Those that are per worker are together on each worker.
            kwargs.pop("colocate_with", None)
            return create_per_worker_variable(lambda: next_creator(**kwargs), self._handles, self._read_on_all)
        with tf.device(None), tf.device(self._device_of_next(kwargs.pop("colocate_with", None))):
            variable = next_creator(**kwargs)
        tensorflow_internals.make_shared(variable)
        self._variables.add(variable, kwargs.get("initial_value"))
        return variable

    def _device_of_next(self, colocate_with: Any) -> str:
        if colocate_with is not None:
            return str(colocate_with.device)
        return self._parameter_server_devices[next(self._variable_numbers) % len(self._parameter_server_devices)]

    def _resource_creator_scope(self) -> Sequence[Any]:
        return table_creator_scopes(self._handles)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, tf.Variable):
            raise ValueError(f"colocate_vars_with takes a tf.Variable, got {colocate_with_variable!r}.")

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.warn_unless_scheduled("run")
        with tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **kwargs)

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], group: bool
    ) -> Any:
        # A per-worker variable names the client's device, and is updated where the function runs.
        with tf.device(None if self._handles.resource_for(var.handle) else var.device):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return value

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return value

    def _local_results(self, val: Any) -> tuple[Any]:
        return (val,)

    def value_container(self, value: Any) -> Any:
        """The value itself: no container is made for a single replica."""
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return replica_id

    def _use_merge_call(self) -> bool:
        return False

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that a replica computes on, as seen from its worker."""
        return ("/device:CPU:0",)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that variables are on."""
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


class _ScheduledTracing:
    """Counts, for this thread, how many scheduled functions are being traced."""

    def __init__(self, state: threading.local) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.depth = getattr(self._state, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._state.depth -= 1
