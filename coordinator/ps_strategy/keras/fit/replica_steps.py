"""The training step of a model on all devices of a worker: each computes on a part of the batch.

A step on several replicas equals one on a single device: Keras divides the loss of each by their number, and sums what
they want to change. So it does by `tf.distribute.MirroredStrategy`. Batches that cannot be divided evenly give the
examples of the smaller parts a larger weight.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.replica_values import concatenated, divided, map_replica_values

Step = Callable[[Any], Any]


def on_replicas(step: Step, strategy: Any) -> Step:
    """Returns a step that runs on each replica of a worker.

    Args:
      step: takes a batch, or the part of a batch, nested as the data is, and returns tensors.
      strategy: the strategy.

    Returns:
      A function that takes a batch, which it divides, or one of `PerReplica` values. It returns the mean of what the
      replicas return, and what the first returns where that is no floating-point number.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return step

    @functools.wraps(step)
    def replicated(batch: Any) -> Any:
        outputs = strategy.run(step, args=(divided(batch, replicas),))
        return map_replica_values(functools.partial(_combined, strategy), outputs)

    return replicated


def _combined(strategy: Any, value: Any) -> Any:
    parts = strategy.experimental_local_results(value)
    if len(parts) == 1 or not (isinstance(parts[0], tf.Tensor) and parts[0].dtype.is_floating):
        return parts[0]
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)


def whole(batch: Any) -> Any:
    """Returns a batch of `PerReplica` values in one piece, for a step that runs on a single device of the worker."""
    return map_replica_values(lambda part: concatenated(part, 0), batch)
