"""Variables and lookup tables with a copy on each worker.

Each also exists on the client, as an ordinary object that can be used, saved and exported. In a function that runs on a
worker, its handle is replaced by that of the worker's copy (`PerWorkerHandles`), so that reads and look-ups are local.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import call_within
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete
from coordinator.ps_strategy.tensorflow_internals.handles import (
    is_restored_resource,
    resource_creator_scope,
    restored_functions,
)

_logger = logging.getLogger("coordinator")

# In seconds: nothing but this process takes part.
_LONGEST_CREATION = 60.0


def get_current_worker_index() -> tf.Tensor:
    """Returns the task index of the worker that runs the function, as an int64 scalar.

    Call it in a scheduled function or a dataset function; one trace serves all workers:
    `dataset.shard(number_of_workers, coordinator.get_current_worker_index())`.

    Raises:
      RuntimeError: outside of such a function.
    """
    strategy = tf.distribute.get_strategy()
    services = getattr(strategy.extended, "services", None)
    if services is None or tf.executing_eagerly():
        raise RuntimeError(
            "get_current_worker_index() is known only inside a function that is scheduled on a "
            "coordinator.ParameterServerStrategy, or inside a dataset function of one."
        )
    return services.worker_index()


def worker_number(name: str, handles: PerWorkerHandles, of: Callable[[WorkerContext], int]) -> Callable[[], tf.Tensor]:
    """Returns a function that reads a number of the worker that runs the function being traced, an int64 scalar.

    A variable on each worker holds it, rather than a constant, because TensorFlow copies small constants into the
    function that captures them. The one on the client, which is captured, is created when the number is first read:
    most programs never do, and the first operation that a process computes itself takes TensorFlow long.

    Args:
      name: used in messages.
      handles: where the variable is registered.
      of: returns the number; called again whenever the worker has lost its state.
    """
    copies = PerWorkerResource(name, lambda context: tf.Variable(of(context), dtype=tf.int64, trainable=False))
    created: dict[str, tf.Variable] = {}

    def create() -> tf.Variable:
        with tf.device("/device:CPU:0"):
            return tf.Variable(-1, dtype=tf.int64, trainable=False, name=name.replace(" ", "_"))

    # AutoGraph converts what a user's function calls, and would warn of what it cannot convert.
    @tf.autograph.experimental.do_not_convert
    def read() -> tf.Tensor:
        if name not in created:
            # On a thread that traces nothing and is in no scope, such as the strategy's.
            variable = call_within(_LONGEST_CREATION, "coordinator-worker-number", create)
            handles.add(variable, _handles_of(copies))
            # Of two threads that come here at once, the first decides.
            created.setdefault(name, variable)
        return created[name].read_value()

    return read


def create_per_worker_variable(
    create: Callable[[], tf.Variable],
    handles: PerWorkerHandles,
    read_on_all: Callable[[PerWorkerResource], list[Any]],
) -> tf.Variable:
    """Creates a variable on the client that represents one on each worker (`per_worker_variable=True`).

    A scheduled function that uses it, as a capture or an argument, reads and changes its own worker's copy. Outside of
    scheduled functions it is an ordinary variable on the client. It has an additional method, `read_all()`, which
    returns the current values of the copies: a list of tensors on the client, by worker.

    Args:
      create: creates one variable on the current device; called once for each worker and once for the client.
      handles: where the variable is registered.
      read_on_all: reads a resource on every worker.
    """
    return _with_copies(create, lambda _: create(), handles, read_on_all)[0]


def create_state_of_sequences(
    create: Callable[[], tf.Variable],
    handles: PerWorkerHandles,
    read_on_all: Callable[[PerWorkerResource], list[Any]],
) -> tf.Variable:
    """Creates a per-worker variable for what a batch leaves for the next batch of the same sequences.

    What is assigned to the variable on the client, as `reset_state()` of a layer does, is what all copies continue
    with. Assign it while no function runs that uses the variable. A worker that was restarted begins with it again,
    and the log says so.

    Args:
      create: creates the variable on the client.
      handles: where the variable is registered.
      read_on_all: reads a resource on every worker.
    """
    begun: set[int] = set()

    def build(context: WorkerContext) -> tf.Variable:
        if context.index in begun:
            _logger.warning(
                "%s has lost its state of %s, and begins again with what was assigned on the client: the sequences "
                "that it is in the middle of continue without what came before.",
                context.device,
                variable.name,
            )
        begun.add(context.index)
        # Not by `create`, which belongs to the function that is traced if the layer is built in it.
        return tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype, shape=variable.shape)

    variable, resources = _with_copies(create, build, handles, read_on_all)
    assign = variable.assign

    @functools.wraps(assign)
    def assign_to_all(*args: Any, **kwargs: Any) -> Any:
        result = assign(*args, **kwargs)
        if tf.executing_eagerly():
            begun.clear()
            for resource in resources:
                resource.recreate()
        return result

    variable.assign = assign_to_all
    return variable


def _with_copies(
    create: Callable[[], tf.Variable],
    build: Callable[[WorkerContext], tf.Variable],
    handles: PerWorkerHandles,
    read_on_all: Callable[[PerWorkerResource], list[Any]],
) -> tuple[Any, tuple[PerWorkerResource, PerWorkerResource]]:
    """Returns a variable on the client, and what makes its copies and their handles."""
    with tf.device("/device:CPU:0"):
        variable = create()
    copies = PerWorkerResource(f"per-worker variable {variable.name}", build)
    of_handles = _handles_of(copies)
    handles.add(variable, of_handles)
    variable.read_all = lambda: [tf.convert_to_tensor(value, variable.dtype) for value in read_on_all(copies)]
    return variable, (copies, of_handles)


def _handles_of(copies: PerWorkerResource) -> PerWorkerResource:
    return PerWorkerResource(copies.name, lambda context: copies.value_on(context).handle)


def table_creator_scopes(handles: PerWorkerHandles) -> Sequence[Any]:
    """Returns scopes in which each lookup table gets a copy on every worker.

    The copies of a `tf.lookup.StaticHashTable` are created as the table was, those of a table from a SavedModel by the
    functions that were saved with it.

    Args:
      handles: where the tables are registered.
    """

    def create(next_creator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        table = next_creator(*args, **kwargs)
        if is_restored_resource(table):
            handles.add(table, _restored_copies(weakref.ref(table)))
        else:
            tables = PerWorkerResource("lookup table", lambda _: next_creator(*args, **kwargs))
            handles.add(
                table, PerWorkerResource("lookup table", lambda context: tables.value_on(context).resource_handle)
            )
        return table

    kinds = ("StaticHashTable", "RestoredStaticHashTable")
    return [resource_creator_scope(kind, create) for kind in kinds]


def _restored_copies(table_ref: Callable[[], Any]) -> PerWorkerResource:
    def build(context: WorkerContext) -> tf.Tensor:
        table = table_ref()
        create, initialize = restored_functions(table)
        handle = call_concrete(create, create.captured_inputs, context.cancellation)
        captures = [handle if tensor is table.resource_handle else tensor for tensor in initialize.captured_inputs]
        call_concrete(initialize, captures, context.cancellation)
        return handle

    return PerWorkerResource("lookup table of a SavedModel", build)
