import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch.server_process import LocalServers, ServerProcess, free_addresses, free_cluster
from coordinator.launch.server_starter import ForkServerProcess
from coordinator.launch.task_config import TaskConfig
from tests.launch.fake_tensorflow import STARTS_A_THREAD, write_fake_tensorflow

TIMEOUT = 60.0


@pytest.fixture(params=["forked", pytest.param("fresh", marks=pytest.mark.long)])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """With "fresh", the fork server cannot fork, and makes every server a fresh process."""
    begin = STARTS_A_THREAD if request.param == "fresh" else ""
    return {**os.environ, "PYTHONPATH": write_fake_tensorflow(tmp_path / "fake", begin=begin)}


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServerProcess]:
    with contextlib.closing(ForkServerProcess(tmp_path / "fork-server.log")) as fork_server:
        yield fork_server


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str], fork_server: ForkServerProcess) -> Iterator[ServerProcess]:
    config = TaskConfig({"worker": free_addresses(1)}, "worker", 0)
    server = ServerProcess(config, tmp_path, environment, fork_server)
    yield server
    server.kill()


@pytest.mark.parametrize("environment", ["forked", "fresh"], indirect=True)
def test_a_server_runs_from_start_to_kill_and_again_on_its_port(server: ServerProcess) -> None:
    assert not server.is_alive()
    assert server.pid is None
    for name in ("worker-0.log", "worker-0.restart-1.log"):
        server.start()
        server.wait_ready(TIMEOUT)
        assert server.is_alive()
        server.kill()
        assert not server.is_alive()
        assert server.exit_code == -signal.SIGKILL
        assert server.log_path.name == name
        # That it serves is printed when the address answers, or just after.
        assert server.log_path.read_text().count("CUDA_VISIBLE_DEVICES") == 1


def test_a_frozen_server_does_not_answer_until_it_is_thawed(server: ServerProcess) -> None:
    server.start()
    server.wait_ready(TIMEOUT)
    server.send(signal.SIGSTOP)
    server.send(signal.SIGSTOP)
    assert server.is_alive()
    with pytest.raises(LaunchError, match="does not answer"):
        server.wait_ready(0.2)
    server.send(signal.SIGCONT)
    server.wait_ready(TIMEOUT)


def test_a_port_that_is_taken_is_named(server: ServerProcess) -> None:
    with socket.create_server(("127.0.0.1", server.config.port)):
        server.start()
        with pytest.raises(LaunchError, match="ended with code 2 before it served") as raised:
            server.wait_ready(TIMEOUT)
    assert f"port {server.config.port}: Address already in use" in str(raised.value)


def test_several_servers_start_together_and_none_is_left(tmp_path: Path, environment: dict[str, str]) -> None:
    servers = LocalServers(free_cluster({"worker": 2, "ps": 1}), tmp_path, environment)
    servers.start()
    servers.wait_ready(TIMEOUT)
    assert servers["ps", 0].is_alive()
    servers["ps", 0].send(signal.SIGSTOP)
    with pytest.raises(ClusterSpecError, match="no /job:ps/task:1 here; there are /job:worker/task:0, /job:worker"):
        servers["ps", 1]
    servers.close()
    assert not any(server.is_alive() for server in servers)
    logs = {"worker-0.log", "worker-1.log", "ps-0.log", "fork-server.log"}
    assert {path.name for path in tmp_path.glob("*.log")} == logs


def test_a_server_that_has_served_is_waited_for_until_it_is_back_or_given_up(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with contextlib.closing(LocalServers(free_cluster({"worker": 2, "ps": 1}), tmp_path, environment)) as servers:
        servers.start()
        servers.wait_ready(TIMEOUT)
        server = servers["worker", 0]
        server.kill()
        with pytest.raises(LaunchError, match=r"/job:worker/task:0 at \S+ ended by SIGKILL .*\. Its log"):
            servers.wait_ready(TIMEOUT)
        servers.wait_ready(TIMEOUT, is_given_up=lambda each: each is server)
        asked: list[ServerProcess] = []

        def is_given_up(each: ServerProcess) -> bool:
            if each is server and len(asked) < 2:
                asked.append(each)
                if len(asked) == 2:
                    server.start()
            return False

        servers.wait_ready(TIMEOUT, is_given_up)
        assert server.is_ready
        assert server.starts == 2
