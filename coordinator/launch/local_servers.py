"""The servers of a cluster on this machine: one process and one log each, and the fork server.

It promises that all of them start at the same time, and that `close` leaves no process behind, frozen ones included.
"""

import pathlib
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import portpicker

from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch.server_process import ServerProcess
from coordinator.launch.server_starter import ForkServerProcess
from coordinator.launch.task_config import TaskConfig

# Below the ports that the kernel hands to outgoing connections. A client that tries again and again to reach a dead
# server on one of those is, sooner or later, given that very port, connects to itself, and keeps the server out.
_PORTS = range(10_000, 32_768)
_MOST_ATTEMPTS = 10_000


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
        port = secrets.choice(_PORTS)
        address = f"127.0.0.1:{port}"
        if address not in found and address not in besides and portpicker.is_port_free(port):
            found.append(address)
    raise LaunchError(f"There are no {count} free ports between {_PORTS.start} and {_PORTS.stop}: end some servers.")


class LocalServers:
    """Server processes by job and index.

    Args:
      configs: the task of each server.
      log_folder: an existing folder, for logs such as `ps-0.log` of `/job:ps/task:0`, and `fork-server.log`.
      environment: the environment that the processes inherit, as it is now, also those that start later.
    """

    def __init__(self, configs: Sequence[TaskConfig], log_folder: pathlib.Path, environment: Mapping[str, str]):
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._fork_server = (
            ForkServerProcess(log_folder / "fork-server.log") if ForkServerProcess.is_supported() else None
        )
        self._servers: dict[tuple[str, int], ServerProcess] = {}
        for config in configs:
            self.add(config)

    def add(self, config: TaskConfig) -> ServerProcess:
        """Adds a server, not yet started."""
        log_path = self._log_folder / f"{config.job}-{config.index}.log"
        server = ServerProcess(config, log_path, self._environment, self._fork_server)
        self._servers[config.job, config.index] = server
        return server

    def start(self) -> None:
        """Starts all servers at once.

        Raises:
          LaunchError: one could not be started.
        """
        for server in self:
            server.start()

    def wait_ready(self, timeout: float) -> None:
        """Waits until every server answers.

        Args:
          timeout: for all of them together, in seconds.

        Raises:
          LaunchError: the message says which one did not, and how its log ends.
        """
        deadline = time.monotonic() + timeout
        for server in self:
            server.wait_ready(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends all servers, and returns when they are gone."""
        if self._fork_server is not None:
            self._fork_server.close()
        for server in self:
            server.kill()

    def __getitem__(self, task: tuple[str, int]) -> ServerProcess:
        if task not in self._servers:
            names = ", ".join(server.config.name for server in self)
            raise ClusterSpecError(f"There is no /job:{task[0]}/task:{task[1]} here; there are {names}.")
        return self._servers[task]

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(tuple(self._servers.values()))
