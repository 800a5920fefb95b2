"""Which worker a function runs on, as a tensor that is bound when it runs."""

from collections.abc import Callable

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext


def get_current_worker_index() -> tf.Tensor:
    """The task index of the worker that runs the function, as an int64 scalar.

    To be called while a scheduled function or a dataset function is traced. One trace serves all workers:
    `dataset.shard(number_of_workers, coordinator.get_current_worker_index())`.

    Raises:
      RuntimeError: outside of such a function.
    """
    strategy = tf.distribute.get_strategy()
    index = getattr(strategy, "worker_index", None)
    if index is None or tf.executing_eagerly():
        raise RuntimeError(
            "get_current_worker_index() is known only inside a function that is scheduled on a "
            "coordinator.ParameterServerStrategy, or inside a dataset function of one."
        )
    return index()


class WorkerNumber:
    """A variable on each worker that holds a number of the worker's. Calling it reads the one where the function runs.

    A variable rather than a constant, since TensorFlow copies small constants into the function that captures them.

    Args:
      name: for people.
      handles: told that the variable stands for one on each worker.
      of: gives the number; called anew whenever what was on the worker is gone.
    """

    def __init__(self, name: str, handles: PerWorkerHandles, of: Callable[[WorkerContext], int]) -> None:
        with tf.device("/device:CPU:0"):
            self._variable = tf.Variable(-1, dtype=tf.int64, trainable=False, name=name.replace(" ", "_"))
        copies = PerWorkerResource(name, lambda context: tf.Variable(of(context), dtype=tf.int64, trainable=False))
        handles.add(
            self._variable,
            PerWorkerResource(name, lambda context: tensorflow_internals.variable_handle(copies.value_on(context))),
        )

    def __call__(self) -> tf.Tensor:
        """The number of the worker that runs the function that is being traced, an int64 scalar."""
        return self._variable.read_value()
