"""Several replicas in one function that is being traced, each on its device.

    the function  ----- run ----+-- thread of replica 0 --+-- merge_call --+-- thread of replica 0 --+--> PerReplica
                                `-- thread of replica 1 --'                `-- thread of replica 1 --'

One thread runs at a time, in the order of the replicas, until it calls `merge_call` or ends: a merge needs the values
of all replicas. All add operations to the graph of the function. The threads end before `call_for_each_replica` does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_run

from coordinator.ps_strategy.tensorflow_internals.replica_values import reduced


def is_one_of_several() -> bool:
    """Returns True in a replica of `call_for_each_replica`."""
    # Private: other replica contexts, which run alone, are of the public class.
    return isinstance(tf.distribute.get_replica_context(), mirrored_run._MirroredReplicaContext)


def call_for_each_replica(
    strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], devices: Sequence[str]
) -> Any:
    """Calls a function once for each replica, in the function that is being traced.

    Args:
      strategy: has `num_replicas_in_sync` replicas.
      fn: called in a replica context, with the replica's part of each `PerReplica` among the arguments. If it is a
        `tf.function`, its operations are added to the graph as those of a Python function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      devices: of the replicas. What uses a resource is placed with that resource instead.

    Returns:
      What it returned, in the same structure, with `PerReplica` values in place of tensors.

    Raises:
      RuntimeError: the replicas make different numbers of merge calls, or one in a nested function or branch.
      Exception: what the function raises.
    """
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
        status = tf.__internal__.autograph.control_status_ctx()
        fn = tf.__internal__.autograph.tf_convert(fn.python_function, status)

    @tf.autograph.experimental.do_not_convert
    def on_its_device(*replica_args: Any, **replica_kwargs: Any) -> Any:
        # Private: the public attribute is a tensor.
        number = tf.distribute.get_replica_context()._replica_id_in_sync_group
        with tf.device(None), tf.compat.v1.device(functools.partial(_placed, devices[number])):
            # Identities, so that values which are the same in all replicas are `PerReplica` too.
            return tf.nest.map_structure(_own, fn(*replica_args, **replica_kwargs))

    # Private: `merge_call` with several replicas needs a thread for each, and no public class has one.
    return mirrored_run.call_for_each_replica(strategy, on_its_device, args, kwargs)


def _placed(device: str, operation: Any) -> str:
    if operation.device or any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return str(operation.device)
    return device


def _own(value: Any) -> Any:
    return tf.nest.map_structure(tf.identity, value, expand_composites=True) if tf.is_tensor(value) else value


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A scope in which a replica reads and changes variables by itself, as if it were another worker."""
    if not is_one_of_several():
        yield
        return
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0):
        yield


def apply_once(function: Callable[[Any], object], gradient: Any) -> None:
    """Calls a function that changes a variable by a gradient; once for all replicas, by the sum of their gradients."""
    if not is_one_of_several():
        function(gradient)
        return

    def merged(_: tf.distribute.Strategy, gradients: Any) -> None:
        function(reduced(tf.distribute.ReduceOp.SUM, gradients))

    tf.distribute.get_replica_context().merge_call(merged, args=(gradient,))


def refuse_replica(what: str) -> None:
    """Raises RuntimeError in one of several replicas, where each of them would do `what`."""
    if is_one_of_several():
        raise RuntimeError(
            f"{what} is used once for all devices of a worker, and was called on each. Call it in the scheduled "
            "function, around strategy.run or after it, with gradients that strategy.reduce has summed."
        )
