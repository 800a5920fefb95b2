"""Tests of servers as processes: of one, of all of a machine, and of the ports that are free for them."""

import contextlib
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch import server_process as module
from coordinator.launch.server_process import LocalServers, ServerProcess, free_addresses, free_cluster
from tests.launch.conftest import Tasks
from tests.launch.fake_tensorflow import STARTS_A_THREAD

TIMEOUT = 60.0


def test_a_server_runs_from_start_to_kill_and_again_on_its_port(tasks: Tasks) -> None:
    server = tasks.server()
    assert not server.is_alive()
    assert server.pid is None
    for name in ("worker-0.log", "worker-0.restart-1.log"):
        server.start()
        assert not server.is_ready
        server.wait_ready(TIMEOUT)
        assert server.is_ready
        server.kill()
        assert not server.is_alive()
        assert server.exit_code == -signal.SIGKILL
        assert server.log_path.name == name
        # That it serves is printed when the address answers, or just after.
        assert server.log_path.read_text().count("CUDA_VISIBLE_DEVICES") == 1
    with socket.create_server(("127.0.0.1", server.config.port)):
        server.start()
        with pytest.raises(LaunchError, match="ended with code 2 before it served") as raised:
            server.wait_ready(TIMEOUT)
    assert f"port {server.config.port}: Address already in use" in str(raised.value)
    server.start()
    server.wait_ready(TIMEOUT)
    # Frozen, it does not answer until it is thawed.
    server.send(signal.SIGSTOP)
    server.send(signal.SIGSTOP)
    assert server.is_alive()
    with pytest.raises(LaunchError, match="does not answer"):
        server.wait_ready(0.2)
    server.send(signal.SIGCONT)
    server.wait_ready(TIMEOUT)


@pytest.mark.long
def test_a_server_runs_too_where_tensorflow_has_threads_and_cannot_be_forked(tasks: Tasks) -> None:
    tasks.load(begin=STARTS_A_THREAD)
    server = tasks.server()
    server.start()
    server.wait_ready(TIMEOUT)
    server.kill()
    assert server.exit_code == -signal.SIGKILL


def test_several_servers_start_together_and_are_waited_for_until_back_or_given_up(tasks: Tasks) -> None:
    servers = LocalServers(free_cluster({"worker": 2, "ps": 1}), tasks.folder, tasks.environment)
    with contextlib.closing(servers):
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
        assert (server.is_ready, server.starts) == (True, 2)
        with pytest.raises(ClusterSpecError, match="no /job:ps/task:1 here; there are /job:worker/task:0, /job:worker"):
            servers["ps", 1]
        servers["ps", 0].send(signal.SIGSTOP)
    assert not any(server.is_alive() for server in servers)
    logs = {"worker-0.log", "worker-0.restart-1.log", "worker-1.log", "ps-0.log", "fork-server.log"}
    assert {path.name for path in tasks.folder.glob("*.log")} == logs


def test_the_port_of_a_server_that_ended_a_moment_ago_is_free_and_taken_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_ATTEMPTS", 20)
    [address] = free_addresses(1)
    port = int(address.rpartition(":")[2])
    monkeypatch.setattr(module, "PORTS", range(port, port + 1))
    # As servers listen: also on a port whose last connection ended a moment ago.
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_connection(("127.0.0.1", port)):
        # The end that closes first keeps the port in the state TIME_WAIT for a minute.
        listener.accept()[0].close()
        with pytest.raises(LaunchError, match="no 1 free ports"):
            free_addresses(1)
    assert free_addresses(1) == [address]
    with pytest.raises(LaunchError):
        free_addresses(1, besides=[address])
    socket.create_server(("127.0.0.1", port)).close()


def test_a_server_restarted_while_its_end_is_noticed_is_still_waited_for(tmp_path: Path) -> None:
    def process(code: int | None) -> SimpleNamespace:
        ignored = dict.fromkeys(("kill", "send"), lambda *_: None)
        return SimpleNamespace(is_lost=False, pid=None, wait=lambda *_: code, **ignored)

    def restart(*_: object) -> int:
        ended.wait = lambda *_: -signal.SIGKILL
        servers["worker", 0].start()
        return -signal.SIGKILL

    ended = process(None)
    ended.wait = restart
    processes = [ended, process(None)]
    starter = SimpleNamespace(start_server=lambda *_: processes.pop(0), close=lambda: None)
    servers = LocalServers({"worker": free_addresses(1)}, tmp_path, {}, starters={("worker", 0): starter})
    servers.start()
    # Nothing answers here, so the second start counts as a server that need not answer.
    servers.wait_ready(60.0, lambda server: server.starts == 2)
    assert servers["worker", 0].is_alive()
