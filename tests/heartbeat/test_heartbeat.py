"""The client's side of the heartbeat, with the real process behind it."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator import background_thread
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.probes import Obstacle
from coordinator.launch.server_process import free_addresses
from coordinator.testing import StatusServer
from tests.deadline import LIMIT, wait_until
from tests.program_runner import ProgramRunner

# Far more than a healthy server needs to answer on a busy machine, in seconds.
TIMEOUT = 1.0


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(interval=0.1, timeout=TIMEOUT)
    yield heartbeat
    heartbeat.close()


@pytest.fixture
def address() -> str:
    [address] = free_addresses(1)
    return address


def wait_state(heartbeat: Heartbeat, address: str, liveness: Liveness) -> ServerState:
    wait_until(lambda: heartbeat.state(address).liveness is liveness)
    return heartbeat.state(address)


def wait_passed(heartbeat: Heartbeat, connection: socket.socket) -> None:
    """Returns when the process has a duplicate."""
    identity = os.fstat(connection.fileno()).st_ino
    wait_until(lambda: heartbeat.process is not None and identity in heartbeat.process.passed)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
    # Reads all of gRPC's first message, so that no data is left to be read.
    assert connection.recv(4096)
    return connection


def test_a_server_is_unknown_until_it_was_probed() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.state("127.0.0.1:1") == ServerState(Liveness.UNKNOWN)
    heartbeat.close()


def test_a_server_that_answers_has_its_incarnation_since_now(heartbeat: Heartbeat, address: str) -> None:
    begun = time.monotonic()
    with StatusServer(address, incarnation=7):
        heartbeat.watch(address)
        state = wait_state(heartbeat, address, Liveness.ANSWERING)
    assert state.incarnation == 7
    assert begun <= state.since <= time.monotonic()


def test_a_killed_server_is_gone_and_not_silent(heartbeat: Heartbeat, address: str) -> None:
    with StatusServer(address):
        heartbeat.watch(address)
        wait_state(heartbeat, address, Liveness.ANSWERING)
    wait_state(heartbeat, address, Liveness.GONE)
    assert heartbeat.state(address).liveness is not Liveness.SILENT
    assert heartbeat.state(address).last_silence == -math.inf


def test_connections_to_a_frozen_server_are_shut_down_until_it_thaws(
    heartbeat: Heartbeat, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat.watch(address)
    with caplog.at_level(logging.WARNING, "coordinator"), StatusServer(address) as server:
        with connect(address) as connection:
            wait_passed(heartbeat, connection)
            wait_state(heartbeat, address, Liveness.ANSWERING)
            server.freeze()
            assert connection.recv(1) == b""
            wait_state(heartbeat, address, Liveness.SILENT)
            assert heartbeat.state(address).liveness is Liveness.SILENT
            assert heartbeat.state(address).last_silence == math.inf
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as opened:
            assert opened.recv(1) == b""
        server.thaw()
        state = wait_state(heartbeat, address, Liveness.ANSWERING)
        assert heartbeat.state(address).last_silence == state.since
        with connect(address) as connection:
            wait_passed(heartbeat, connection)
            assert heartbeat.state(address).liveness is Liveness.ANSWERING
            connection.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
    silent, again = (record.getMessage() for record in caplog.records)
    assert silent.startswith(f"{address} has not answered for 1 s: it accepts connections but does not answer")
    assert again.startswith(f"{address} answers again after ")


@pytest.mark.long
def test_of_two_servers_on_one_port_only_the_frozen_one_is_silent(heartbeat: Heartbeat, address: str) -> None:
    neighbour = address.replace("127.0.0.1", "127.0.0.2")
    with StatusServer(address) as server, StatusServer(neighbour), connect(address) as one, connect(neighbour) as other:
        heartbeat.watch(address)
        heartbeat.watch(neighbour)
        wait_passed(heartbeat, one)
        wait_passed(heartbeat, other)
        wait_state(heartbeat, neighbour, Liveness.ANSWERING)
        server.freeze()
        assert one.recv(1) == b""
        assert heartbeat.state(neighbour).liveness is Liveness.ANSWERING
        other.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_server_that_was_forgotten_is_unknown(heartbeat: Heartbeat, address: str) -> None:
    with StatusServer(address):
        heartbeat.watch(address)
        wait_state(heartbeat, address, Liveness.ANSWERING)
        heartbeat.forget(address)
        assert heartbeat.state(address) == ServerState(Liveness.UNKNOWN)
        heartbeat.forget(address)
        heartbeat.watch(address)
        wait_state(heartbeat, address, Liveness.ANSWERING)


def test_a_connection_that_was_closed_here_ends(heartbeat: Heartbeat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        heartbeat.watch(f"{host}:{port}")
        with socket.create_connection((host, port)) as connection:
            wait_passed(heartbeat, connection)
            # The connection of the probe may have been accepted first.
            accepted = [server.accept()[0], server.accept()[0]]
            here = connection.getsockname()
        ours = next(each for each in accepted if each.getpeername() == here)
        ours.settimeout(LIMIT)
        assert ours.recv(1) == b""
        for each in accepted:
            each.close()


@pytest.mark.parametrize("address", ["worker", "worker:", ":80", "worker:http"])
def test_an_invalid_address_is_refused(heartbeat: Heartbeat, address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        heartbeat.watch(address)


def test_a_killed_process_is_restarted(heartbeat: Heartbeat, address: str, caplog: pytest.LogCaptureFixture) -> None:
    heartbeat.watch(address)
    with StatusServer(address) as server, connect(address) as connection:
        wait_passed(heartbeat, connection)
        wait_state(heartbeat, address, Liveness.ANSWERING)
        killed = heartbeat.process
        assert killed is not None
        with caplog.at_level(logging.WARNING, "coordinator"):
            os.kill(killed.pid, signal.SIGKILL)
            wait_until(lambda: heartbeat.process not in (None, killed))
        server.freeze()
        assert connection.recv(1) == b""
    [record] = [record for record in caplog.records if "is restarted" in record.getMessage()]
    assert f"({killed.pid}) ended with code -9" in record.getMessage()


def test_closing_ends_the_process_at_once_and_may_be_repeated() -> None:
    heartbeat = Heartbeat(interval=60.0, timeout=60.0)
    heartbeat.watch("127.0.0.1:1")
    wait_until(lambda: heartbeat.process is not None)
    begun = time.monotonic()
    heartbeat.close()
    heartbeat.close()
    assert time.monotonic() - begun < LIMIT
    heartbeat.watch("127.0.0.1:1")


def test_its_repr_names_the_watched_servers(heartbeat: Heartbeat, address: str) -> None:
    assert repr(heartbeat) == "<Heartbeat: watches nothing>"
    heartbeat.watch(address)
    wait_state(heartbeat, address, Liveness.GONE)
    assert repr(heartbeat) == f"<Heartbeat: {address} gone>"


HELD_UP = """
    import ctypes, faulthandler, os, signal, socket, sys, threading, time

    from coordinator.heartbeat.heartbeat import Heartbeat
    from coordinator.heartbeat.open_connections import Endpoint, OpenConnections
    from coordinator.heartbeat.heartbeat_process import Liveness

    faulthandler.dump_traceback_later(60, exit=True)
    # Calls through it keep Python's global lock: no other thread runs until they return.
    libc = ctypes.PyDLL(None)
    host, port, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    heartbeat = Heartbeat(interval=0.1, timeout=1.0)
    heartbeat.watch(f"{host}:{port}")
    pause = threading.Event()
    while heartbeat.state(f"{host}:{port}").liveness is not Liveness.ANSWERING:
        pause.wait(0.01)

    def wait_end(connection):
        received = ctypes.create_string_buffer(4096)
        while libc.recv(connection.fileno(), received, len(received), 0) > 0:
            pass

    connection = socket.create_connection((host, port))
    while os.fstat(connection.fileno()).st_ino not in heartbeat.process.passed:
        pause.wait(0.01)
"""


def test_a_call_that_blocks_all_threads_of_the_client_is_freed(run_program: ProgramRunner, address: str) -> None:
    host, _, port = address.rpartition(":")
    with StatusServer(address) as server:
        run_program(
            HELD_UP
            + """
    os.kill(server, signal.SIGSTOP)
    wait_end(connection)
    os.kill(server, signal.SIGCONT)
    heartbeat.close()
    """,
            host,
            port,
            server.pid,
            fresh=True,
        )


def test_a_connection_opened_while_all_threads_are_blocked_is_shut_down(
    run_program: ProgramRunner, address: str
) -> None:
    """If the system allows the process to duplicate descriptors of the client."""
    host, _, port = address.rpartition(":")
    with StatusServer(address) as server:
        run_program(
            HELD_UP
            + """
    os.kill(server, signal.SIGSTOP)
    while heartbeat.state(f"{host}:{port}").liveness is not Liveness.SILENT:
        pause.wait(0.01)
    is_allowed = bool(OpenConnections(heartbeat.process.pid).find({Endpoint.of(host, port)}))
    end = (2).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + socket.inet_aton(host) + bytes(8)
    with socket.socket() as late:
        # The lock is not handed over between the two calls.
        sys.setswitchinterval(1000)
        assert libc.connect(late.fileno(), end, len(end)) == 0
        if is_allowed:
            wait_end(late)
    sys.setswitchinterval(0.005)
    os.kill(server, signal.SIGCONT)
    heartbeat.close()
    """,
            host,
            port,
            server.pid,
            fresh=True,
        )


NO_HOST_NAMES = ["worker-0..svc:2222", f"{64 * 'a'}.svc:2222", ".:2222", "a\0b:2222"]


@pytest.mark.parametrize("no_host_name", NO_HOST_NAMES)
def test_a_text_that_is_no_host_name_hides_no_other_server(
    heartbeat: Heartbeat, address: str, no_host_name: str
) -> None:
    heartbeat.watch(no_host_name)
    wait_until(lambda: heartbeat.state(no_host_name).obstacle is Obstacle.UNRESOLVED)
    with StatusServer(address):
        heartbeat.watch(address)
        wait_state(heartbeat, address, Liveness.ANSWERING)
    wait_state(heartbeat, address, Liveness.GONE)


def test_the_heartbeat_goes_on_after_an_unexpected_error(
    heartbeat: Heartbeat, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_thread, "_FIRST_PAUSE", 0.001)
    find, failed = OpenConnections.find, threading.Event()

    def fail_once(connections: OpenConnections, peers: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("broken")
        return find(connections, peers)

    monkeypatch.setattr(OpenConnections, "find", fail_once)
    with StatusServer(address):
        heartbeat.watch(address)
        wait_until(failed.is_set)
        wait_state(heartbeat, address, Liveness.ANSWERING)
    assert "The thread coordinator-heartbeat met an unexpected RuntimeError" in caplog.text
