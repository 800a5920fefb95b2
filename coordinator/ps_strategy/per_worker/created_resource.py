"""Any resource that a function of the user's creates: queues, tables that change, variables, random generators.

It also exists once on the client, which represents the copies: what a scheduled function captures of it is replaced by
the worker's own, as for tables and variables (`PerWorkerHandles`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext
from coordinator.ps_strategy.tensorflow_internals.handles import free_if_present
from coordinator.ps_strategy.tensorflow_internals.mutable_tables import let_run_anywhere


def create_per_worker_resource(create: Callable[[], Any], handles: PerWorkerHandles) -> Any:
    """Creates a resource on the client that represents one on each worker; see `ParameterServerStrategy`.

    Args:
      create: creates one on the current device; called once for the client, and for each worker on its thread.
      handles: where it is registered.

    Raises:
      TypeError: `create` is no function, or what it returns has no resource.
    """
    if not callable(create):
        raise TypeError(f"create_per_worker_resource takes a function that creates a resource, got {create!r}.")
    name = getattr(create, "__name__", type(create).__name__)

    def create_here() -> Any:
        with tf.device("/device:CPU:0"):
            return create()

    # A separate thread: on this one a scope of the strategy may place variables on parameter servers.
    with ThreadPoolExecutor(1, "coordinator-resource") as thread:
        value = thread.submit(create_here).result()
    found = list(_handles_in(value))
    if not found:
        raise TypeError(
            f"The function {name!r} was given to create_per_worker_resource, and returned {value!r}, in which there is "
            "no resource. It must return a variable, a table, a queue, a tf.random.Generator, a tensor of the dtype "
            "tf.resource, or a list, tuple, dict or tf.Module of these."
        )
    # What follows must not keep the value alive.
    count = len(found)
    copies = PerWorkerResource(f"the resource of {name}", lambda _: create())

    def handle_on(place: int, context: WorkerContext) -> Any:
        of_worker = list(_handles_in(copies.value_on(context)))
        if len(of_worker) != count:
            raise ValueError(f"{name!r} returned {len(of_worker)} resources there, and {count} on the client")
        return of_worker[place][1]

    for place, (owner, _) in enumerate(found):
        handles.add(owner, PerWorkerResource(copies.name, functools.partial(handle_on, place)))
    return value


def _handles_in(value: Any) -> Iterator[tuple[Any, tf.Tensor]]:
    """Yields what represents each resource in a value, the owner of its handle or the handle, and the handle."""
    if isinstance(value, tf.Variable):
        yield value, value.handle
    elif isinstance(value, tf.Tensor) and value.dtype == tf.resource:
        yield value, value
    elif isinstance(value, tf.queue.QueueBase):
        free_if_present(value)
        yield value.queue_ref, value.queue_ref
    elif isinstance(value, tf.random.Generator):
        yield value.state, value.state.handle
    elif isinstance(handle := getattr(value, "resource_handle", None), tf.Tensor):
        let_run_anywhere(value)
        yield value, handle
    else:
        for part in _parts_of(value):
            yield from _handles_in(part)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, tf.Module):
        value = dict(sorted(vars(value).items()))
    return value.values() if isinstance(value, dict) else ()
