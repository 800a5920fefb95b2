"""Lookup tables of which every worker has its own copy, so that a lookup is local to the step.

A `tf.lookup.StaticHashTable` made in the strategy's scope is an ordinary table on the client: it can be looked up,
copied, saved and exported as ever. In a function that runs on a worker, its handle stands for the worker's copy. A
table that a SavedModel brings is made on each worker by the functions that were saved with it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext


def table_creator_scopes(handles: PerWorkerHandles) -> Sequence[Any]:
    """The scopes in which each table that is made gets a copy on every worker.

    Args:
      handles: told which resource stands behind each table.
    """

    def create(next_creator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        table = next_creator(*args, **kwargs)
        if tensorflow_internals.is_restored_resource(table):
            handles.add(table, _restored_copies(weakref.ref(table)))
        else:
            handles.add(table, _copies(lambda: next_creator(*args, **kwargs)))
        return table

    kinds = ("StaticHashTable", "RestoredStaticHashTable")
    return [tensorflow_internals.resource_creator_scope(kind, create) for kind in kinds]


def _copies(create: Callable[[], Any]) -> PerWorkerResource:
    tables = PerWorkerResource("lookup table", lambda _: create())
    return PerWorkerResource("lookup table", lambda context: tables.value_on(context).resource_handle)


def _restored_copies(table_ref: Callable[[], Any]) -> PerWorkerResource:
    def build(context: WorkerContext) -> tf.Tensor:
        table = table_ref()
        create, initialize = tensorflow_internals.restored_functions(table)
        handle = tensorflow_internals.call(create, create.captured_inputs, context.cancellation)
        captures = [handle if tensor is table.resource_handle else tensor for tensor in initialize.captured_inputs]
        tensorflow_internals.call(initialize, captures, context.cancellation)
        return handle

    return PerWorkerResource("lookup table of a SavedModel", build)
