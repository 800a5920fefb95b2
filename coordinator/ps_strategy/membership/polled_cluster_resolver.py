"""A cluster resolver whose answer may change while training runs: workers join, leave and move.

Promise: the description is read each time; one that is not valid raises, and changes nothing.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClusterSpecError
from coordinator.paths import local_path


class PolledClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Describes the cluster by a function or a file, which is read periodically.

        resolver = coordinator.PolledClusterResolver("cluster.json", interval=5.0)
        strategy = coordinator.ParameterServerStrategy(resolver)

    Its strategy adds workers that appear and removes those that disappear. A lost worker that disappears, and one that
    appears, are taken for the same worker at another address. Parameter servers hold the variables and cannot change.

    Args:
      source: a function that returns a cluster, or the path of a JSON file with one, in the form of "cluster" in
        TF_CONFIG: `{"worker": ["host:port", ...], "ps": ["host:port", ...]}`.
      interval: from one reading to the next, in seconds.
      rpc_layer: the protocol of the servers.

    Raises:
      TypeError: `source` is neither.
      ValueError: `interval` is not positive, or the path is a URL.
    """

    def __init__(
        self,
        source: Callable[[], Mapping[str, Sequence[str]]] | str | os.PathLike[str],
        interval: float = 5.0,
        rpc_layer: str = "grpc",
    ) -> None:
        if not callable(source) and not isinstance(source, str | os.PathLike):
            raise TypeError(f"PolledClusterResolver takes a function or the path of a JSON file, got {source!r}.")
        if not interval > 0:
            raise ValueError(f"interval must be a positive number of seconds, got {interval!r}.")
        if not callable(source):
            source = functools.partial(_cluster_in, local_path(source, "The file of a cluster"))
        self._read = source
        self.rpc_layer = rpc_layer
        self._parameter_servers: list[str] | None = None
        self.task_type = "chief"
        self.task_id = 0
        self.interval = interval

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns the cluster as it is described now."""
        cluster = self._read()
        if not isinstance(cluster, Mapping):
            raise ClusterSpecError(f"A cluster is a dict of addresses by job, got {cluster!r}.")
        return tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.items()})

    def worker_addresses(self) -> Mapping[int, str] | list[str]:
        """Returns the addresses that workers have in the description; by index, if each worker keeps its own.

        Raises:
          ClusterSpecError: the description names no worker, or other parameter servers than before.
        """
        spec = self.cluster_spec().as_dict()
        if not spec.get("worker"):
            raise ClusterSpecError("The description no longer has a 'worker'; at least one must stay.")
        if self._parameter_servers is None:
            self._parameter_servers = spec.get("ps")
        elif spec.get("ps") != self._parameter_servers:
            raise ClusterSpecError(
                f"The description has the parameter servers {spec.get('ps')} instead of {self._parameter_servers}, "
                "but they hold the variables and cannot change."
            )
        return list(spec["worker"])

    def close(self) -> None:
        """Ends a `worker_addresses` that waits, for a subclass where it does; part of `strategy.close()`."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the empty name: the client is its own master."""
        return ""

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        """Returns no accelerators: functions run on the CPUs of the workers."""
        return {}


def _cluster_in(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ClusterSpecError(f"The cluster cannot be read from {path}: {error}") from None


def resolver_of(given: Any) -> Any:
    """Returns a resolver: what was given, or a `PolledClusterResolver` for a function or a path."""
    is_source = callable(given) or isinstance(given, os.PathLike)
    return PolledClusterResolver(given) if is_source else given
