"""The heartbeat process, driven by the client's end of its link."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from coordinator.heartbeat.heartbeat import HeartbeatClient
from coordinator.launch.server_process import free_addresses
from coordinator.testing import StatusServer
from tests.deadline import LIMIT, wait_until
from tests.program_runner import ProgramRunner

# Far more than a healthy server needs to answer on a busy machine, in seconds.
TIMEOUT = 1.0


@pytest.fixture
def child() -> Iterator[HeartbeatClient]:
    child = HeartbeatClient(interval=0.1, timeout=TIMEOUT)
    yield child
    child.end(LIMIT)


@pytest.fixture
def address() -> str:
    [address] = free_addresses(1)
    return address


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
    # Reads all of gRPC's first message, so that no data is left to be read.
    assert connection.recv(4096)
    return connection


def identity_of(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


class Client:
    """Updates the process and receives its messages, as a client does."""

    def __init__(self, child: HeartbeatClient) -> None:
        self.child = child
        self.received: list[dict[str, Any]] = []

    def update(self, watched: dict[str, int], connections: dict[socket.socket, int] | None = None) -> None:
        handles = {identity_of(connection): connection for connection in connections or ()}
        numbers = {identity_of(connection): number for connection, number in (connections or {}).items()}
        assert self.child.update(watched, numbers, lambda identity: handles[identity].dup())

    def wait_state(self, number: int, state: str) -> dict[str, Any]:
        """Returns the next message of this kind."""
        while True:
            for position, message in enumerate(self.received):
                if (message["number"], message["liveness"]) == (number, state):
                    del self.received[: position + 1]
                    return message
            assert select.select([self.child], [], [], LIMIT)[0], f"{number} is not {state}; received {self.received}."
            messages = self.child.receive()
            assert messages is not None, "The process ended."
            self.received += messages


@pytest.fixture
def client(child: HeartbeatClient) -> Client:
    return Client(child)


def test_a_server_that_answers_is_reported_with_its_incarnation(client: Client, address: str) -> None:
    with StatusServer(address, incarnation=7):
        client.update({address: 0})
        assert client.wait_state(0, "answering")["incarnation"] == 7


def test_a_killed_server_is_gone_and_returns_as_another_incarnation(client: Client, address: str) -> None:
    client.update({address: 0})
    client.wait_state(0, "gone")
    with StatusServer(address, incarnation=1):
        assert client.wait_state(0, "answering")["incarnation"] == 1
    client.wait_state(0, "gone")
    with StatusServer(address, incarnation=2):
        assert client.wait_state(0, "answering")["incarnation"] == 2


def test_connections_to_a_frozen_server_are_shut_down_until_it_thaws(client: Client, address: str) -> None:
    host, _, port = address.rpartition(":")
    neighbour = address.replace("127.0.0.1", "127.0.0.2")
    with StatusServer(address) as server, StatusServer(neighbour), connect(address) as one, connect(neighbour) as other:
        client.update({address: 0, neighbour: 1}, {one: 0, other: 1})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        assert one.recv(1) == b""
        assert is_open(other), "a server on another host with the same port"
        with socket.create_connection((host, int(port)), timeout=LIMIT) as opened:
            client.update({address: 0, neighbour: 1}, {opened: 0, other: 1})
            assert opened.recv(1) == b""
        server.thaw()
        client.wait_state(0, "answering")
        with connect(address) as connection:
            client.update({address: 0}, {connection: 0})
            wait_probes(client, address)
            assert is_open(connection)


@pytest.mark.long
def test_a_frozen_server_that_is_killed_is_gone(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        client.update({address: 0})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        server.kill()
        client.wait_state(0, "gone")


def test_a_forgotten_server_is_left_alone(client: Client, address: str) -> None:
    with StatusServer(address) as server, connect(address) as connection:
        client.update({address: 0}, {connection: 0})
        client.wait_state(0, "answering")
        client.update({})
        server.freeze()
        # A server that is frozen before its first probe is found silent later than this one would have been.
        neighbour = address.replace("127.0.0.1", "127.0.0.2")
        with StatusServer(neighbour) as other:
            other.freeze()
            client.update({neighbour: 1})
            client.wait_state(1, "silent")
        assert is_open(connection)


def test_a_server_that_is_watched_again_is_reported_again(client: Client, address: str) -> None:
    with StatusServer(address):
        client.update({address: 0})
        client.wait_state(0, "answering")
        client.update({address: 1})
        client.wait_state(1, "answering")


def test_a_connection_that_the_client_closed_ends(client: Client, address: str) -> None:
    with StatusServer(address), socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connection:
            client.update({address: 0}, {connection: 0})
            client.wait_state(0, "answering")
        with server.accept()[0] as accepted:
            accepted.settimeout(LIMIT)
            client.update({address: 0})
            assert accepted.recv(1) == b""


@pytest.mark.long
def test_a_pause_of_the_process_is_not_mistaken_for_a_silent_server(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        client.update({address: 0})
        client.wait_state(0, "answering")
        server.freeze()
        # Now a probe is in progress,
        assert not select.select([client.child], [], [], 0.5)[0]
        os.kill(client.child.pid, signal.SIGSTOP)
        # and its deadline has long passed when the process continues.
        assert not select.select([client.child], [], [], TIMEOUT + 2.0)[0]
        server.thaw()
        os.kill(client.child.pid, signal.SIGCONT)
        assert not select.select([client.child], [], [], 0.5)[0]
    client.wait_state(0, "gone")
    assert client.received == []


def test_its_command_line_says_what_it_is(child: HeartbeatClient) -> None:
    process = psutil.Process(child.pid)
    # It has no command line for a moment while its program is loaded.
    wait_until(process.cmdline)
    command = process.cmdline()
    assert command[2:6] == ["-m", "coordinator.heartbeat.heartbeat_process", "--client", str(os.getpid())]


def test_signals_to_the_process_group_do_not_end_it(client: Client, address: str) -> None:
    with StatusServer(address):
        client.update({address: 0})
        client.wait_state(0, "answering")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(client.child.pid, number)
    client.wait_state(0, "gone")


def test_it_is_in_a_separate_session(child: HeartbeatClient) -> None:
    assert os.getsid(child.pid) == child.pid


def test_it_ends_with_code_0_when_the_client_closes_the_link(child: HeartbeatClient) -> None:
    assert child.end(LIMIT) == 0


def test_it_ends_when_the_client_is_killed(run_program: ProgramRunner) -> None:
    """The runner fails a program that leaves a process."""
    run_program(
        """
        import os, select, signal
        from coordinator.heartbeat.heartbeat import HeartbeatClient

        child = HeartbeatClient(interval=0.1, timeout=1.0)
        child.update({"127.0.0.1:1": 0}, {}, None)
        assert select.select([child], [], [], 30)[0]
        # Neither its pipe for errors nor its link may stay open elsewhere, or it does not notice.
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        exit_code=-signal.SIGKILL,
        fresh=True,
    )


def test_it_imports_modules_from_the_same_places_as_the_client(tmp_path: Any, run_program: ProgramRunner) -> None:
    """It starts in any folder, and with modules of any name beside the program."""
    (tmp_path / "programs" / "statistics.py").write_text("raise ImportError('not this one')")
    run_program(
        """
        import select
        from coordinator.heartbeat.heartbeat import HeartbeatClient

        child = HeartbeatClient(interval=0.1, timeout=1.0)
        child.update({"127.0.0.1:1": 0}, {}, None)
        assert select.select([child], [], [], 30)[0]
        assert child.receive()[0]["liveness"] == "gone"
        assert child.end(30) == 0
        """,
        fresh=True,
    )


def is_open(connection: socket.socket) -> bool:
    """Returns True if neither side has ended a connection without unread data."""
    return not select.select([connection], [], [], 0)[0]


def wait_probes(client: Client, address: str) -> None:
    """Returns when the process has carried out all earlier updates, and has probed a server once more."""
    [other] = free_addresses(1)
    client.update({address: 0, other: 1})
    client.wait_state(1, "gone")
