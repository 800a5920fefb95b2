"""The heartbeat process, driven by the client's end of its link."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from coordinator.heartbeat.heartbeat_client import HeartbeatChild
from coordinator.launch.free_addresses import free_addresses
from tests.deadline import LIMIT, wait_until
from tests.program_runner import ProgramRunner
from tests.status_server import StatusServer

# Far more than a server that is well needs to answer, on a machine that is busy, in seconds.
TIMEOUT = 2.0


@pytest.fixture
def child() -> Iterator[HeartbeatChild]:
    child = HeartbeatChild(interval=0.1, timeout=TIMEOUT)
    yield child
    child.end(LIMIT)


@pytest.fixture
def address() -> str:
    [address] = free_addresses(1)
    return address


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
    # Not a byte of gRPC's greeting must be left to be read.
    assert connection.recv(4096)
    return connection


def identity_of(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


class Client:
    """What a client would do: it tells the process what to watch, and hears of changes."""

    def __init__(self, child: HeartbeatChild) -> None:
        self.child = child
        self.heard: list[dict[str, Any]] = []

    def tell(self, watched: dict[str, int], connections: dict[socket.socket, int] | None = None) -> None:
        handles = {identity_of(connection): connection for connection in connections or ()}
        numbers = {identity_of(connection): number for connection, number in (connections or {}).items()}
        assert self.child.tell(watched, numbers, lambda identity: handles[identity].dup())

    def wait_state(self, number: int, state: str) -> dict[str, Any]:
        """Returns the first news of this kind that was not waited for before."""
        while True:
            for position, message in enumerate(self.heard):
                if (message["number"], message["state"]) == (number, state):
                    del self.heard[: position + 1]
                    return message
            assert select.select([self.child], [], [], LIMIT)[0], f"{number} is not {state}; heard {self.heard}."
            news = self.child.receive()
            assert news is not None, "The process ended."
            self.heard += news


@pytest.fixture
def client(child: HeartbeatChild) -> Client:
    return Client(child)


def test_a_server_that_answers_is_told_with_its_incarnation(client: Client, address: str) -> None:
    with StatusServer(address, incarnation=7):
        client.tell({address: 0})
        assert client.wait_state(0, "answering")["incarnation"] == 7


def test_a_server_that_was_killed_is_gone_and_one_started_again_has_another_incarnation(
    client: Client, address: str
) -> None:
    client.tell({address: 0})
    client.wait_state(0, "gone")
    with StatusServer(address, incarnation=1):
        assert client.wait_state(0, "answering")["incarnation"] == 1
    client.wait_state(0, "gone")
    with StatusServer(address, incarnation=2):
        assert client.wait_state(0, "answering")["incarnation"] == 2


def test_connections_to_a_frozen_server_are_shut_down(client: Client, address: str) -> None:
    with StatusServer(address) as server, connect(address) as connection:
        client.tell({address: 0}, {connection: 0})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        assert connection.recv(1) == b""


def test_a_server_that_was_frozen_before_anybody_asked_is_silent(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        server.freeze()
        client.tell({address: 0})
        client.wait_state(0, "silent")


def test_a_connection_that_is_opened_to_a_silent_server_is_shut_down(client: Client, address: str) -> None:
    host, _, port = address.rpartition(":")
    with StatusServer(address) as server:
        server.freeze()
        client.tell({address: 0})
        client.wait_state(0, "silent")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            client.tell({address: 0}, {connection: 0})
            assert connection.recv(1) == b""


def test_a_frozen_server_that_is_killed_is_gone(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        client.tell({address: 0})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        server.kill()
        client.wait_state(0, "gone")


def test_a_thawed_server_answers_again_and_its_new_connections_live(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        client.tell({address: 0})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        server.thaw()
        client.wait_state(0, "answering")
        with connect(address) as connection:
            client.tell({address: 0}, {connection: 0})
            wait_probes(client, address)
            assert is_open(connection)


def test_of_two_servers_on_one_port_only_the_frozen_one_is_hung_up_on(client: Client, address: str) -> None:
    neighbour = address.replace("127.0.0.1", "127.0.0.2")
    with StatusServer(address) as server, StatusServer(neighbour), connect(address) as one, connect(neighbour) as other:
        client.tell({address: 0, neighbour: 1}, {one: 0, other: 1})
        client.wait_state(0, "answering")
        server.freeze()
        client.wait_state(0, "silent")
        assert one.recv(1) == b""
        assert is_open(other)


def test_a_forgotten_server_is_left_alone(client: Client, address: str) -> None:
    with StatusServer(address) as server, connect(address) as connection:
        client.tell({address: 0}, {connection: 0})
        client.wait_state(0, "answering")
        client.tell({})
        server.freeze()
        # Its neighbour is found silent later than it would have been.
        neighbour = address.replace("127.0.0.1", "127.0.0.2")
        with StatusServer(neighbour) as other:
            other.freeze()
            client.tell({neighbour: 1})
            client.wait_state(1, "silent")
        assert is_open(connection)


def test_a_server_that_is_watched_anew_is_told_anew(client: Client, address: str) -> None:
    with StatusServer(address):
        client.tell({address: 0})
        client.wait_state(0, "answering")
        client.tell({address: 1})
        client.wait_state(1, "answering")


def test_a_connection_that_the_client_closed_ends(client: Client, address: str) -> None:
    with StatusServer(address), socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connection:
            client.tell({address: 0}, {connection: 0})
            client.wait_state(0, "answering")
        with server.accept()[0] as accepted:
            accepted.settimeout(LIMIT)
            client.tell({address: 0})
            assert accepted.recv(1) == b""


def test_a_pause_of_the_process_is_not_taken_for_the_silence_of_a_server(client: Client, address: str) -> None:
    with StatusServer(address) as server:
        client.tell({address: 0})
        client.wait_state(0, "answering")
        server.freeze()
        # Now a probe is under way,
        assert not select.select([client.child], [], [], 0.5)[0]
        os.kill(client.child.pid, signal.SIGSTOP)
        # and its deadline has long passed when the process goes on.
        assert not select.select([client.child], [], [], TIMEOUT + 2.0)[0]
        server.thaw()
        os.kill(client.child.pid, signal.SIGCONT)
        assert not select.select([client.child], [], [], 0.5)[0]
    client.wait_state(0, "gone")
    assert client.heard == []


def test_its_command_line_says_what_it_is(child: HeartbeatChild) -> None:
    process = psutil.Process(child.pid)
    # It has none for a moment while its program is loaded.
    wait_until(process.cmdline)
    command = process.cmdline()
    assert command[2:6] == ["-m", "coordinator.heartbeat.heartbeat_process", "--client", str(os.getpid())]


def test_no_signal_to_all_processes_of_a_job_ends_it(client: Client, address: str) -> None:
    with StatusServer(address):
        client.tell({address: 0})
        client.wait_state(0, "answering")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(client.child.pid, number)
    client.wait_state(0, "gone")


def test_it_is_in_a_session_of_its_own(child: HeartbeatChild) -> None:
    assert os.getsid(child.pid) == child.pid


def test_it_ends_with_code_0_when_the_client_hangs_up(child: HeartbeatChild) -> None:
    assert child.end(LIMIT) == 0


def test_it_ends_when_the_client_is_killed(run_program: ProgramRunner) -> None:
    """The runner fails a program that leaves a process."""
    run_program(
        """
        import os, select, signal
        from coordinator.heartbeat.heartbeat_client import HeartbeatChild

        child = HeartbeatChild(interval=0.1, timeout=1.0)
        child.tell({"127.0.0.1:1": 0}, {}, None)
        assert select.select([child], [], [], 30)[0]
        # Neither its pipe for errors nor its link may stay open, or the runner waits for the one who holds it.
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        exit_code=-signal.SIGKILL,
    )


def test_it_finds_its_modules_where_the_client_does(tmp_path: Any, run_program: ProgramRunner) -> None:
    """In any folder, and with modules of any name beside the program."""
    (tmp_path / "programs" / "statistics.py").write_text("raise ImportError('not this one')")
    run_program(
        """
        import select
        from coordinator.heartbeat.heartbeat_client import HeartbeatChild

        child = HeartbeatChild(interval=0.1, timeout=1.0)
        child.tell({"127.0.0.1:1": 0}, {}, None)
        assert select.select([child], [], [], 30)[0]
        assert child.receive()[0]["state"] == "gone"
        assert child.end(30) == 0
        """
    )


def is_open(connection: socket.socket) -> bool:
    """Whether neither side has ended a connection that has nothing to be read."""
    return not select.select([connection], [], [], 0)[0]


def wait_probes(client: Client, address: str) -> None:
    """Returns when the process has obeyed what it was told before, and has probed a server once more."""
    [other] = free_addresses(1)
    client.tell({address: 0, other: 1})
    client.wait_state(1, "gone")
