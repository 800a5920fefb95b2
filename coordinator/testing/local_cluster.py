"""A real cluster on this machine: one process per server, which a test may kill, freeze and start again.

Guarantees: every server answers when the cluster is entered, and closing it leaves no process, port or folder behind.
However this process ends, the servers end, too. One more process, the fork server, lives as long as the cluster.
"""

import os
import pathlib
import shutil
import signal
import tempfile
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from coordinator.background_thread import only_here
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch.serve import UNUSABLE
from coordinator.launch.server_process import LocalServers, free_addresses, free_cluster
from coordinator.launch.task_config import TaskConfig
from coordinator.options import is_integer

if TYPE_CHECKING:
    import tensorflow as tf

# The maximum number of attempts to start all servers. Another program may take a free port before its server starts.
_MOST_STARTS = 3


class LocalCluster:
    """Workers and parameter servers as processes, on free loopback ports.

        with LocalCluster(workers=2, ps=1) as cluster:
            strategy = coordinator.ParameterServerStrategy(cluster.resolver)
            ...
            cluster.kill("worker", 0)
            cluster.restart("worker", 0)

    Different threads may kill and restart different servers; only one thread at a time may use a server.

    Args:
      workers: how many workers, at least one.
      ps: how many parameter servers, at least one.
      devices_per_worker: how many logical CPU devices each worker has, at least one; each is a replica.
      start_timeout: how long a server may take until it answers, in seconds.

    Raises:
      ClusterSpecError: there is no worker, no parameter server, or a worker has no device.
    """

    def __init__(self, workers: int = 2, ps: int = 1, *, devices_per_worker: int = 1, start_timeout: float = 120.0):
        for name, count in (("workers", workers), ("ps", ps), ("devices_per_worker", devices_per_worker)):
            if not is_integer(count, minimum=1):
                raise ClusterSpecError(f"LocalCluster needs {name} to be an integer of at least 1, got {count!r}.")
        self._counts = {"worker": workers, "ps": ps}
        self._devices_per_worker = devices_per_worker
        self._start_timeout = start_timeout
        self._spec: dict[str, list[str]] = {}
        self._servers: LocalServers | None = None
        self._resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None

    def start(self) -> "LocalCluster":
        """Starts all servers; returns this cluster when each server answers. Entering the cluster does this.

        If another program takes a server's port during the start, all servers are started again on other ports.

        Raises:
          LaunchError: the cluster was started before, or a server did not start; then all servers are closed.
        """
        if self._servers is not None:
            raise LaunchError(f"{self!r} was started already.")
        for attempts_left in reversed(range(_MOST_STARTS)):
            self._spec = free_cluster(self._counts)
            folder = pathlib.Path(tempfile.mkdtemp(prefix="local-cluster-"))
            # A process forked from this one would delete a `TemporaryDirectory`, too.
            self._remove_folder = weakref.finalize(self, only_here(partial(shutil.rmtree, folder, ignore_errors=True)))
            self._servers = LocalServers(self._spec, folder, os.environ, worker_devices=self._devices_per_worker)
            try:
                self._servers.start()
                self._servers.wait_ready(self._start_timeout)
                break
            except BaseException as error:
                self.close()
                is_port_taken = any(server.exit_code == UNUSABLE for server in self._servers)
                if not (isinstance(error, LaunchError) and is_port_taken and attempts_left):
                    raise
        return self

    def close(self) -> None:
        """Ends every server and removes the folder with their logs. Calling it again does nothing."""
        if self._servers is not None:
            self._servers.close()
            self._remove_folder()

    @property
    def spec(self) -> dict[str, list[str]]:
        """The addresses of each job, as the cluster was started."""
        return {job: list(addresses) for job, addresses in self._spec.items()}

    @property
    def resolver(self) -> "tf.distribute.cluster_resolver.ClusterResolver":
        """A cluster resolver for the client, which is the chief."""
        if self._resolver is None:
            self._running()
            import tensorflow as tf

            self._resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(self._spec), task_type="chief", task_id=0, rpc_layer="grpc"
            )
        return self._resolver

    @property
    def processes(self) -> Mapping[tuple[str, int], int | None]:
        """The process id of every server, by job and index."""
        return {(server.config.job, server.config.index): server.pid for server in self._running()}

    def pid(self, job: str, index: int) -> int | None:
        """Returns the present or last process id of a server."""
        return self._running()[job, index].pid

    def is_alive(self, job: str, index: int) -> bool:
        """Returns True if the process of a server runs, frozen or not."""
        return self._running()[job, index].is_alive()

    def kill(self, job: str, index: int) -> None:
        """Ends a server with SIGKILL; returns when it is gone.

        Raises:
          ClusterSpecError: there is no such server. The methods below raise it, too.
        """
        self._running()[job, index].kill()

    def restart(self, job: str, index: int, *, wait: bool = True) -> None:
        """Ends a server if it runs, and starts it again on its port.

        Args:
          job: `worker` or `ps`.
          index: the server's index.
          wait: return when it answers; otherwise return immediately, and `wait_ready` waits for it.

        Raises:
          LaunchError: the server did not start.
        """
        server = self._running()[job, index]
        server.kill()
        server.start()
        if wait:
            server.wait_ready(self._start_timeout)

    def wait_ready(self, job: str, index: int, timeout: float | None = None) -> None:
        """Waits until a server answers.

        Args:
          job: `worker` or `ps`.
          index: the server's index.
          timeout: in seconds; None for the cluster's `start_timeout`.

        Raises:
          LaunchError: the server's process ended, or the server did not answer in time.
        """
        self._running()[job, index].wait_ready(self._start_timeout if timeout is None else timeout)

    def freeze(self, job: str, index: int) -> None:
        """Stops a server without ending it, like a hanging host: connections stay open, nothing answers.

        Raises:
          LaunchError: the server does not run.
        """
        self._running()[job, index].send(signal.SIGSTOP)

    def thaw(self, job: str, index: int) -> None:
        """Continues a frozen server.

        Raises:
          LaunchError: the server does not run.
        """
        self._running()[job, index].send(signal.SIGCONT)

    def start_worker(self, devices: int | None = None) -> str:
        """Starts an additional worker; returns its address when it answers.

        The worker has the next free index, for `kill` and the other methods. `spec` and `resolver` lack the worker.

        Args:
          devices: how many logical CPU devices it has; None for `devices_per_worker`.

        Raises:
          LaunchError: the worker did not start.
        """
        servers = self._running()
        workers = [server.config.address for server in servers if server.config.job == "worker"]
        [address] = free_addresses(1, besides=[server.config.address for server in servers])
        devices = self._devices_per_worker if devices is None else devices
        config = TaskConfig({**self._spec, "worker": [*workers, address]}, "worker", len(workers), devices)
        server = servers.add(config)
        server.start()
        server.wait_ready(self._start_timeout)
        return address

    def __enter__(self) -> "LocalCluster":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._servers is None:
            return f"LocalCluster(workers={self._counts['worker']}, ps={self._counts['ps']}, not started)"
        states = ", ".join(
            f"{server.config.name} at {server.config.address} {'runs' if server.is_alive() else 'does not run'}"
            for server in self._servers
        )
        return f"LocalCluster({states})"

    def _running(self) -> LocalServers:
        if self._servers is None:
            raise LaunchError("The cluster is not started: enter it, or call start().")
        return self._servers
