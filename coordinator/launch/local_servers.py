"""The servers of a cluster: one process and one log each, forked from a fork server on this machine, or elsewhere.

It promises that all of them start at the same time; that `close` leaves no process behind, frozen ones included; and
that no server outlives this process, even if this process is killed: each reads a socket that only this process
holds open at the other end. Each has its own session, so a terminal's Ctrl-C does not reach it.
"""

import pathlib
import secrets
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import portpicker

from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.forks import only_here
from coordinator.launch.gpus import VISIBLE
from coordinator.launch.serve import SERVED_JOBS
from coordinator.launch.server_process import ServerProcess, ServerStarter
from coordinator.launch.server_starter import ForkServerProcess
from coordinator.launch.task_config import TaskConfig

# Below the ports that the kernel hands to outgoing connections. A client that tries again and again to reach a dead
# server on one of those is, sooner or later, given that very port, connects to itself, and keeps the server out.
PORTS = range(10_000, 32_768)
_MOST_ATTEMPTS = 10_000
# How often it is looked whether a server that has ended was started again, in seconds.
_RESTART_INTERVAL = 0.1


def free_addresses(count: int, *, besides: Collection[str] = ()) -> list[str]:
    """Returns different `127.0.0.1:port` addresses that nothing listens on.

    Args:
      count: how many.
      besides: addresses not to return, such as those of servers that are down at present.

    Raises:
      LaunchError: there are fewer.
    """
    found: list[str] = []
    for _ in range(_MOST_ATTEMPTS):
        if len(found) == count:
            return found
        # Not `random`: two programs with the same seed would draw the same ports.
        port = secrets.choice(PORTS)
        address = f"127.0.0.1:{port}"
        if address not in found and address not in besides and portpicker.is_port_free(port):
            found.append(address)
    raise LaunchError(f"There are no {count} free ports between {PORTS.start} and {PORTS.stop}: end some servers.")


def free_cluster(counts: Mapping[str, int], *, besides: Collection[str] = ()) -> dict[str, list[str]]:
    """Returns such addresses for each job, as many as `counts` says.

    Raises:
      LaunchError: there are fewer.
    """
    addresses = iter(free_addresses(sum(counts.values()), besides=besides))
    return {job: [next(addresses) for _ in range(count)] for job, count in counts.items()}


class LocalServers:
    """Server processes by job and index.

    Args:
      cluster: the addresses of each job; those of workers and parameter servers get a server.
      log_folder: an existing folder, for logs such as `ps-0.log` of `/job:ps/task:0`, and `fork-server.log`.
      environment: the environment that the processes inherit, as it is now, also those that start later.
      worker_gpus: `CUDA_VISIBLE_DEVICES` of each worker; by default they inherit it.
      starters: what starts a server, by job and index, for those that are not on this machine.
      worker_devices: the number of logical CPU devices of each worker of the first cluster.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]],
        log_folder: pathlib.Path,
        environment: Mapping[str, str],
        worker_gpus: Sequence[str] = (),
        starters: Mapping[tuple[str, int], ServerStarter] = types.MappingProxyType({}),
        worker_devices: int = 1,
    ):
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._close = only_here(self._end)
        self._fork_server = ForkServerProcess(log_folder / "fork-server.log")
        self._starters = starters
        self._servers: dict[tuple[str, str, int], ServerProcess] = {}
        self.add_cluster(cluster, worker_gpus=worker_gpus, worker_devices=worker_devices)

    def add_cluster(
        self,
        cluster: Mapping[str, Sequence[str]],
        owner: str = "",
        worker_gpus: Sequence[str] = (),
        worker_devices: int = 1,
    ) -> None:
        """Adds the servers of a cluster, not yet started.

        Args:
          cluster: as above.
          owner: whose cluster it is, if it is not the first one: part of the names of its servers and of their logs.
          worker_gpus: as above.
          worker_devices: as above.
        """
        for job in SERVED_JOBS:
            for index in range(len(cluster.get(job, ()))):
                gpus = worker_gpus[index] if job == "worker" and worker_gpus else None
                self.add(TaskConfig(cluster, job, index, worker_devices if job == "worker" else 1), owner, gpus)

    def add(self, config: TaskConfig, owner: str = "", gpus: str | None = None) -> ServerProcess:
        """Adds a server, not yet started; `gpus` is its `CUDA_VISIBLE_DEVICES`."""
        starter = self._starters.get((config.job, config.index), self._fork_server)
        environment = self._environment if gpus is None else {**self._environment, VISIBLE: gpus}
        server = ServerProcess(config, self._log_folder, environment, starter, owner)
        self._servers[owner, config.job, config.index] = server
        return server

    def start(self) -> None:
        """Starts all servers at once.

        Raises:
          LaunchError: one could not be started.
        """
        for server in self:
            server.start()

    def wait_ready(self, timeout: float, is_given_up: Callable[[ServerProcess], bool] | None = None) -> None:
        """Waits until every server answers.

        Args:
          timeout: for all of them together, in seconds.
          is_given_up: returns True for a server that is not waited for any more. With it, another thread starts servers
            again that have ended, and they are waited for; without it, such a server is an error.

        Raises:
          LaunchError: the message says which one did not, and how its log ends.
        """
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while waiting := [each for each in self if not (each.is_ready or (is_given_up and is_given_up(each)))]:
            try:
                waiting[0].wait_ready(max(0.0, deadline - time.monotonic()))
            except LaunchError:
                if is_given_up is None or waiting[0].is_alive() or time.monotonic() >= deadline:
                    raise
                pause.wait(_RESTART_INTERVAL)

    def close(self) -> None:
        """Ends all servers, and returns when they are gone; in a process forked from this one, does nothing."""
        self._close()

    def _end(self) -> None:
        self._fork_server.close()
        for starter in self._starters.values():
            starter.close()
        for server in self:
            server.kill()

    def __getitem__(self, task: tuple[str, int]) -> ServerProcess:
        if ("", *task) not in self._servers:
            names = ", ".join(server.name for server in self)
            raise ClusterSpecError(f"There is no /job:{task[0]}/task:{task[1]} here; there are {names}.")
        return self._servers["", *task]

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(tuple(self._servers.values()))
