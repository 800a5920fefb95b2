"""The two that are compared, behind one face: this library, and TensorFlow's own coordinator.

It promises that both run the same functions on the same kind of cluster, each as its documentation says; only what they
do differently is here. Each class is to be made in a process of its own, since a process connects to one cluster.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

import coordinator


class Side(Protocol):
    """What the benchmark asks of each.

    Attributes:
      strategy: its scope puts variables on parameter servers.
      worker_index: the index of the worker that runs a function, inside one.
    """

    strategy: tf.distribute.Strategy
    worker_index: Callable[[], tf.Tensor]

    def schedule(self, function: Any) -> Any:
        """Queues a call of a `tf.function`; returns what `fetch` takes."""

    def fetch(self, scheduled: Any) -> Any:
        """Waits for the result of a call and returns it, or raises what it raised."""

    def join(self) -> None:
        """Waits until every call has finished, or raises what one raised."""

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """Takes checkpoints for what is lost with a parameter server, where that is possible."""


class Library:
    """This library, with its options as they are.

    Args:
      resolver: names the servers.
    """

    def __init__(self, resolver: Any) -> None:
        self.strategy = coordinator.ParameterServerStrategy(resolver)
        self.worker_index = coordinator.get_current_worker_index

    def schedule(self, function: Any) -> Any:
        """See `Side`."""
        return self.strategy.schedule(function)

    def fetch(self, scheduled: Any) -> Any:
        """See `Side`."""
        return scheduled.result()

    def join(self) -> None:
        """See `Side`."""
        self.strategy.join()

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """See `Side`."""
        self.strategy.restore_from(manager)


class Peer:
    """`tf.distribute.coordinator.ClusterCoordinator` with `tf.distribute.ParameterServerStrategy`.

    Args:
      resolver: names the servers.
    """

    def __init__(self, resolver: Any) -> None:
        # As its guide says for every task: a call to a dead server then fails, and does not wait for it.
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.worker_index = tf.distribute.coordinator.experimental_get_current_worker_index
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def schedule(self, function: Any) -> Any:
        """See `Side`."""
        return self._coordinator.schedule(function)

    def fetch(self, scheduled: Any) -> Any:
        """See `Side`."""
        return self._coordinator.fetch(scheduled)

    def join(self) -> None:
        """See `Side`."""
        self._coordinator.join()

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """See `Side`. Nothing is to be done: a lost parameter server is an error here, and the client is restarted."""


SIDES: dict[str, Callable[[Any], Side]] = {"ours": Library, "peer": Peer}
