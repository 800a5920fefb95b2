"""TensorFlow's own: `tf.distribute.coordinator.ClusterCoordinator` with `tf.distribute.ParameterServerStrategy`."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.contestants.side import DatasetFunction


class Peer:
    """See `Side`.

    Args:
      resolver: names the servers.
      partitioner: divides variables; None for none.
    """

    may_have_rules = False

    def __init__(self, resolver: Any, partitioner: Any = None) -> None:
        # As its guide says for every task: a call to a dead server then fails instead of waiting for it.
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        self._strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `Side`."""
        return self._strategy.scope()

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See `Side`: without `strategy.run`, Keras 3's optimizers find no replica context."""
        return lambda *args: self._strategy.run(body, args)

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """See `Side`."""
        return iter(self._coordinator.create_per_worker_dataset(lambda: dataset_fn(tf.distribute.InputContext())))

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        for _ in range(count):
            self._coordinator.schedule(function, args=args)
        self._coordinator.join()

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """See `Side`."""
        return self._coordinator.schedule(function, args=args).fetch()

    def schedule(self, function: Any) -> Callable[[], Any]:
        """See `Side`."""
        return self._coordinator.schedule(function).fetch

    def worker_index(self) -> tf.Tensor:
        """See `RecoverySide`."""
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    def join(self) -> None:
        """See `RecoverySide`."""
        self._coordinator.join()

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """Does nothing: a lost parameter server is an error here, after which the client is restarted."""
