"""Tests of the heartbeat: with the real process and real servers, and of the states of one server on a virtual loop."""

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import background_thread
from coordinator.heartbeat import heartbeat_process
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState, WatchedServer
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.probes import Obstacle, TaskStatus
from coordinator.launch.server_process import free_addresses
from coordinator.testing import StatusServer
from tests.deadline import LIMIT, wait_until
from tests.program_runner import ProgramRunner
from tests.virtual_clock import VirtualLoop

ANSWERING, GONE, SILENT = Liveness.ANSWERING, Liveness.GONE, Liveness.SILENT


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    # A healthy server needs far less than the timeout to answer, on a busy machine too.
    with contextlib.closing(Heartbeat(interval=0.1, timeout=1.0)) as heartbeat:
        yield heartbeat


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


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


NO_HOST_NAMES = ["worker-0..svc:2222", f"{64 * 'a'}.svc:2222", ".:2222", "a\0b:2222"]


def test_connections_to_a_frozen_server_alone_are_shut_down_until_it_thaws(
    heartbeat: Heartbeat, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three servers two freeze, one of which is not watched any more."""
    neighbour, forgotten = (address.replace("127.0.0.1", f"127.0.0.{number}") for number in (2, 3))
    assert heartbeat.state(address) == ServerState(Liveness.UNKNOWN)
    for watched in (address, neighbour, forgotten):
        heartbeat.watch(watched)
    with (
        StatusServer(address, 7) as server,
        StatusServer(neighbour),
        StatusServer(forgotten) as other,
        connect(address) as one,
        connect(neighbour) as two,
        connect(forgotten) as three,
    ):
        for connection in (one, two, three):
            wait_passed(heartbeat, connection)
        before, *_ = [wait_state(heartbeat, each, ANSWERING) for each in (address, neighbour, forgotten)]
        heartbeat.forget(forgotten)
        assert heartbeat.state(forgotten) == ServerState(Liveness.UNKNOWN)
        other.freeze()
        server.freeze()
        assert one.recv(1) == b""
        silent = wait_state(heartbeat, address, SILENT)
        assert (before.incarnation, before.last_silence, silent.last_silence) == (7, -math.inf, math.inf)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as opened:
            assert opened.recv(1) == b""
        server.thaw()
        after = wait_state(heartbeat, address, ANSWERING)
        assert before.since < silent.since < after.since == after.last_silence
        with connect(address) as connection:
            wait_passed(heartbeat, connection)
            assert is_open(connection)
        assert is_open(two), "a server on another host with the same port"
        assert is_open(three), "a server that is not watched"
        server.kill()
        assert wait_state(heartbeat, address, GONE).last_silence == after.since
    silent_line, again = (record.getMessage() for record in caplog.records if address in record.getMessage())
    assert silent_line.startswith(f"{address} has not answered for 1 s: it accepts connections but does not answer")
    assert again.startswith(f"{address} answers again after ")


def test_a_connection_that_was_closed_here_ends_also_after_an_unexpected_error(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_thread, "_FIRST_PAUSE", 0.001)
    find, errors = OpenConnections.find, [RuntimeError("broken")]

    def fail_once(connections: OpenConnections, peers: Any) -> Any:
        if errors:
            raise errors.pop()
        return find(connections, peers)

    monkeypatch.setattr(OpenConnections, "find", fail_once)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as opened:
        host, port = server.getsockname()
        heartbeat.watch(f"{host}:{port}")
        with socket.create_connection((host, port)) as connection:
            wait_passed(heartbeat, connection)
            # The connection of the probe may have been accepted first.
            accepted = [opened.enter_context(server.accept()[0]) for _ in range(2)]
            here = connection.getsockname()
        ours = next(each for each in accepted if each.getpeername() == here)
        ours.settimeout(LIMIT)
        assert ours.recv(1) == b""
    assert "The thread coordinator-heartbeat met an unexpected RuntimeError" in caplog.text


def test_a_killed_process_is_restarted_and_signals_of_a_terminal_do_not_end_it(
    heartbeat: Heartbeat, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts that are no host names hide no other server meanwhile."""
    for invalid in ("worker", "worker:", ":80", "worker:http"):
        with pytest.raises(ValueError, match="host:port"):
            heartbeat.watch(invalid)
    for watched in (*NO_HOST_NAMES, address):
        heartbeat.watch(watched)
    with StatusServer(address) as server, connect(address) as connection:
        wait_passed(heartbeat, connection)
        wait_state(heartbeat, address, ANSWERING)
        assert f"{address} answering" in repr(heartbeat)
        first = heartbeat.process
        assert first is not None
        assert os.getsid(first.pid) == first.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(first.pid, number)
        with connect(address) as another:
            wait_passed(heartbeat, another)
        assert heartbeat.process is first
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: heartbeat.process not in (None, first))
        wait_passed(heartbeat, connection)
        server.kill()
        wait_state(heartbeat, address, GONE)
        for name in NO_HOST_NAMES:
            wait_until(lambda name=name: heartbeat.state(name).obstacle is Obstacle.UNRESOLVED)
    [line] = [record.getMessage() for record in caplog.records if "is restarted" in record.getMessage()]
    assert f"({first.pid}) ended with code -9" in line


def test_closing_ends_the_process_with_code_0_and_may_be_repeated() -> None:
    heartbeat = Heartbeat(interval=600.0, timeout=600.0)
    heartbeat.watch("127.0.0.1:1")
    wait_until(lambda: heartbeat.process is not None)
    for _ in range(2):
        heartbeat.close()
    assert heartbeat.process is not None
    assert heartbeat.process.end(0.0) == 0
    heartbeat.watch("127.0.0.1:1")


def test_calls_that_block_all_threads_end_and_so_does_the_process_with_the_client(
    run_program: ProgramRunner, address: str, tmp_path: Path
) -> None:
    """Also on a connection opened meanwhile, if the process may duplicate descriptors of the client.

    It starts with modules of any name beside the program. The runner fails a program that leaves a process.
    """
    (tmp_path / "programs" / "statistics.py").write_text("raise ImportError('not this one')")
    host, _, port = address.rpartition(":")
    with StatusServer(address) as server:
        run_program(
            """
            import ctypes, faulthandler, os, signal, socket, sys, threading

            from coordinator.heartbeat.heartbeat import Heartbeat
            from coordinator.heartbeat.open_connections import Endpoint, OpenConnections
            from coordinator.heartbeat.heartbeat_process import Liveness

            faulthandler.dump_traceback_later(60, exit=True)
            # Calls through it keep Python's global lock: no other thread runs until they return.
            libc = ctypes.PyDLL(None)
            host, port, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
            heartbeat, pause = Heartbeat(interval=0.1, timeout=1.0), threading.Event()
            heartbeat.watch(f"{host}:{port}")

            def wait_state(liveness):
                while heartbeat.state(f"{host}:{port}").liveness is not liveness:
                    pause.wait(0.01)

            def wait_end(connection):
                received = ctypes.create_string_buffer(4096)
                while libc.recv(connection.fileno(), received, len(received), 0) > 0:
                    pass

            wait_state(Liveness.ANSWERING)
            connection = socket.create_connection((host, port))
            while os.fstat(connection.fileno()).st_ino not in heartbeat.process.passed:
                pause.wait(0.01)
            os.kill(server, signal.SIGSTOP)
            wait_end(connection)
            wait_state(Liveness.SILENT)
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
            # Neither the process's pipe for errors nor its link may stay open elsewhere, or it does not notice.
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            host,
            port,
            server.pid,
            exit_code=-signal.SIGKILL,
            fresh=True,
        )


# On a virtual loop: time passes at once while a server does not answer, and never else.

INTERVAL, TIMEOUT = 1.0, 5.0


# What a probe may find: an answer of an incarnation; no process; or a silence, noticed so many seconds late.
Outcome = int | None | float


def watch(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Outcome | Callable[[WatchedServer], object]],
    connection: socket.socket | None = None,
) -> list[ServerState]:
    """Lets a server be probed with these outcomes, and calls functions in between; returns what was reported."""
    states: list[ServerState] = []

    class FakeProbe(contextlib.nullcontext):
        async def __aenter__(self) -> "FakeProbe":
            return self

        async def status(self, timeout: float) -> TaskStatus | None:
            while outcomes and callable(outcomes[0]):
                outcomes.pop(0)(server)
            if not outcomes:
                raise asyncio.CancelledError
            outcome = outcomes.pop(0)
            if isinstance(outcome, float):
                await asyncio.sleep(timeout + outcome)
                raise TimeoutError
            if isinstance(outcome, int):
                return TaskStatus(outcome, ())
            return None

    monkeypatch.setattr(heartbeat_process, "AsyncTaskProbe", FakeProbe)
    server = WatchedServer("127.0.0.1:1", INTERVAL, TIMEOUT, states.append)
    if connection is not None:
        server.hold(1, connection.dup())
    with contextlib.closing(VirtualLoop()) as loop, contextlib.closing(server), pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(server.run())
    return states


@pytest.mark.parametrize(
    ("outcomes", "reported"),
    [
        ([7], [(ANSWERING, 7, 0.0)]),
        ([7, 7, 8], [(ANSWERING, 7, 0.0), (ANSWERING, 8, 2.0)]),
        ([None, None, 7, None], [(GONE, None, 0.0), (ANSWERING, 7, 2.0), (GONE, None, 3.0)]),
        ([7, 0.0, 0.0, 7], [(ANSWERING, 7, 0.0), (SILENT, None, 6.0), (ANSWERING, 7, 11.0)]),
        # A frozen server is killed.
        ([0.0, None], [(SILENT, None, 5.0), (GONE, None, 5.0)]),
        # A pause of this process is no silence of the server.
        ([7, 2.0, 7], [(ANSWERING, 7, 0.0)]),
    ],
)
def test_changes_are_reported_with_their_time(monkeypatch: pytest.MonkeyPatch, outcomes: list, reported: list) -> None:
    states = watch(monkeypatch, list(outcomes))
    assert [(state.liveness, state.incarnation, state.since) for state in states] == reported
    assert {state.obstacle for state in states if state.liveness is not ANSWERING} <= {Obstacle.REFUSED}


def test_connections_are_shut_down_when_the_server_falls_silent_and_while_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as opened:
        held, late, fresh, released = (
            opened.enter_context(socket.create_connection(listener.getsockname())) for _ in range(4)
        )

        def hold_released(server: WatchedServer) -> None:
            assert is_open(held)
            server.hold(4, released.dup())
            server.release(4)

        def hold_late(server: WatchedServer) -> None:
            assert server.is_silent
            assert not is_open(held)
            server.hold(2, late.dup())
            assert not is_open(late)

        watch(monkeypatch, [7, hold_released, 0.0, hold_late, 7, lambda server: server.hold(3, fresh.dup()), 7], held)
        assert is_open(fresh), "the server answers again"
        assert is_open(released)


def test_an_unexpected_error_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = watch(monkeypatch, [lambda _: 1 / 0, 7])
    assert [state.since for state in states] == [5.0]
    assert "the heartbeat of 127.0.0.1:1 met an unexpected error and goes on after 5 s" in capsys.readouterr().err
