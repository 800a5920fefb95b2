"""Servers that start in a moment, and the fork server that they are forked from."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.launch.server_process import ServerProcess, free_addresses
from coordinator.launch.server_starter import ForkServerProcess
from coordinator.launch.task_config import TaskConfig
from tests.launch.fake_tensorflow import write_fake_tensorflow


class Tasks:
    """Servers to start, in the environment that a test needs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": write_fake_tensorflow(folder / "fake")}
        self.fork_server = ForkServerProcess(folder / "fork-server.log")
        self.package = folder / "fake" / "tensorflow"
        self._servers: list[ServerProcess] = []

    def server(self, index: int = 0, **environment: str) -> ServerProcess:
        config = TaskConfig({"worker": {index: free_addresses(1)[0]}}, "worker", index)
        server = ServerProcess(config, self.folder, {**self.environment, **environment}, self.fork_server)
        self._servers.append(server)
        return server

    def load(self, *, begin: str) -> None:
        """Makes TensorFlow run this code first when it is loaded."""
        path = self.package / "__init__.py"
        path.write_text(begin + path.read_text())

    def close(self) -> None:
        self.fork_server.close()
        for server in self._servers:
            server.kill()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(tmp_path)
    yield tasks
    tasks.close()
