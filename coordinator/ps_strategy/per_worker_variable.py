"""Variables of which every worker has its own, in step with nobody: `tf.Variable(..., per_worker_variable=True)`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext


def create_per_worker_variable(
    create: Callable[[], tf.Variable],
    handles: PerWorkerHandles,
    read_on_all: Callable[[PerWorkerResource], list[Any]],
) -> tf.Variable:
    """Makes a variable on the client that stands for one on each worker.

    A scheduled function that uses it, as a capture or an argument, reads and changes its own worker's copy. Outside of
    scheduled functions it is an ordinary variable on the client. It has one more method, `read_all()`, which returns
    the copies' values now, as a list of NumPy values by worker.

    Args:
      create: makes one variable, on the current device; called once for each worker, and for the client.
      handles: told what the client's variable stands for.
      read_on_all: reads a resource on every worker.
    """
    with tf.device("/device:CPU:0"):
        variable = create()
    copies = PerWorkerResource(f"per-worker variable {variable.name}", lambda _: create())
    handle_of_copy = PerWorkerResource(
        copies.name, lambda context: tensorflow_internals.variable_handle(copies.value_on(context))
    )
    handles.add(variable, handle_of_copy)
    variable.read_all = lambda: read_on_all(copies)
    return variable


class VariableRead:
    """Reads a worker's copy of a per-worker variable."""

    def __init__(self, copies: PerWorkerResource) -> None:
        self._copies = copies

    def run_on(self, context: WorkerContext) -> Any:
        """The value now, as NumPy."""
        with tf.device(context.device):
            return self._copies.value_on(context).numpy()
