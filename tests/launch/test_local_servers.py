import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from coordinator.errors import LaunchError
from coordinator.launch import server_process as module
from coordinator.launch.server_process import LocalServers, free_addresses


def test_the_port_of_a_server_that_ended_a_moment_ago_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    [address] = free_addresses(1)
    host, port = address.partition(":")[::2]
    with listening_on(address) as listener, socket.create_connection((host, int(port))):
        # The end that closes first keeps the port in the state TIME_WAIT for a minute.
        listener.accept()[0].close()
    monkeypatch.setattr(module, "PORTS", range(int(port), int(port) + 1))
    assert free_addresses(1) == [address]
    with listening_on(address):
        pass


def listening_on(address: str) -> socket.socket:
    """Returns a socket that listens as servers do: also on a port whose last connection ended a moment ago."""
    host, _, port = address.partition(":")
    return socket.create_server((host, int(port)))


def test_taken_ports_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_on(free_addresses(1)[0]) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(module, "PORTS", range(taken, taken + 1))
        monkeypatch.setattr(module, "_MOST_ATTEMPTS", 20)
        with pytest.raises(LaunchError, match="no 1 free ports"):
            free_addresses(1)


def test_addresses_of_servers_that_are_down_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    [address] = free_addresses(1)
    port = int(address.partition(":")[2])
    monkeypatch.setattr(module, "PORTS", range(port, port + 1))
    monkeypatch.setattr(module, "_MOST_ATTEMPTS", 20)
    with pytest.raises(LaunchError):
        free_addresses(1, besides=[address])


class FakeProcess:
    """A process that has ended with a code, or runs if the code is None; `on_wait` is called by every wait."""

    is_lost = False
    pid = None

    def __init__(self, code: int | None):
        self.code = code
        self.on_wait = lambda: None

    def wait(self, timeout: float | None = None) -> int | None:
        self.on_wait()
        return self.code

    def kill(self) -> None:
        pass

    def send(self, number: signal.Signals) -> None:
        pass


class FakeStarter:
    """Starts the given processes, one after the other."""

    def __init__(self, *processes: FakeProcess):
        self.processes = [*processes]

    def start_server(self, environment: Mapping[str, str], log: int) -> FakeProcess:
        return self.processes.pop(0)

    def close(self) -> None:
        pass


def test_a_server_restarted_while_its_end_is_noticed_is_still_waited_for(tmp_path: Path) -> None:
    ended, running = FakeProcess(-signal.SIGKILL), FakeProcess(None)
    starters = {("worker", 0): FakeStarter(ended, running)}
    servers = LocalServers({"worker": free_addresses(1)}, tmp_path, {}, starters=starters)
    servers.start()

    def restart() -> None:
        ended.on_wait = lambda: None
        servers["worker", 0].start()

    ended.on_wait = restart
    # Nothing answers here, so the second start counts as a server that need not answer.
    servers.wait_ready(60.0, lambda server: server.starts == 2)
    assert servers["worker", 0].is_alive()
