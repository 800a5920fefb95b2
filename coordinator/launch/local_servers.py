"""The servers of a cluster on this machine: one process and one log each, and the zygote that they are forked from.

It promises that all of them start at the same time, and that `close` leaves no process behind, frozen ones included.
"""

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

from coordinator.errors import ClusterSpecError
from coordinator.launch.server_process import ServerProcess
from coordinator.launch.task_config import TaskConfig
from coordinator.launch.zygote_process import ZygoteProcess


class LocalServers:
    """Server processes by job and index.

    Args:
      configs: the servers to be.
      log_folder: an existing folder, for logs such as `ps-0.log` of `/job:ps/task:0`, and `zygote.log`.
      environment: the environment that the processes inherit, as it is now: also those that start later.
    """

    def __init__(self, configs: Sequence[TaskConfig], log_folder: pathlib.Path, environment: Mapping[str, str]):
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._zygote = ZygoteProcess(log_folder / "zygote.log") if ZygoteProcess.is_supported() else None
        self._servers: dict[tuple[str, int], ServerProcess] = {}
        for config in configs:
            self.add(config)

    def add(self, config: TaskConfig) -> ServerProcess:
        """Adds one more server, not yet started."""
        log_path = self._log_folder / f"{config.job}-{config.index}.log"
        server = ServerProcess(config, log_path, self._environment, self._zygote)
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
        if self._zygote is not None:
            self._zygote.stop_loading()
        for server in self:
            server.kill()
        if self._zygote is not None:
            self._zygote.close()

    def __getitem__(self, task: tuple[str, int]) -> ServerProcess:
        if task not in self._servers:
            names = ", ".join(server.config.name for server in self)
            raise ClusterSpecError(f"There is no /job:{task[0]}/task:{task[1]} here; there are {names}.")
        return self._servers[task]

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(tuple(self._servers.values()))

    def __len__(self) -> int:
        return len(self._servers)

    def __repr__(self) -> str:
        return f"LocalServers({', '.join(map(repr, self))})"
