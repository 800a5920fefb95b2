"""Tests of what is reported about a server and done to its connections, with probes whose outcomes a test decides.

Time passes at once while a server does not answer, and never else.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest

from coordinator.heartbeat import heartbeat_process
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState, WatchedServer
from coordinator.heartbeat.probes import Obstacle, TaskStatus
from tests.virtual_clock import VirtualLoop

INTERVAL, TIMEOUT = 1.0, 5.0

# What a probe may find: an answer of an incarnation; no process; or a silence, noticed so many seconds late.
Outcome = int | None | float
ANSWERING, GONE, SILENT = Liveness.ANSWERING, Liveness.GONE, Liveness.SILENT


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

        def is_open(connection: socket.socket) -> bool:
            connection.setblocking(False)
            try:
                return connection.recv(1) != b""
            except BlockingIOError:
                return True

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


def test_the_probes_end_although_a_probe_takes_their_cancellation_for_its_own_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DeafProbe(contextlib.nullcontext):
        async def __aenter__(self) -> "DeafProbe":
            return self

        async def status(self, _: float) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(TIMEOUT)

    async def watch_and_cancel() -> None:
        server = WatchedServer("127.0.0.1:1", INTERVAL, TIMEOUT, lambda _: None)
        watching = asyncio.create_task(server.run())
        await asyncio.sleep(INTERVAL)
        watching.cancel()
        server.close()
        done, _ = await asyncio.wait([watching], timeout=10 * TIMEOUT)
        assert done == {watching}

    monkeypatch.setattr(heartbeat_process, "AsyncTaskProbe", DeafProbe)
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(watch_and_cancel())


def test_an_unexpected_error_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = watch(monkeypatch, [lambda _: 1 / 0, 7])
    assert [state.since for state in states] == [5.0]
    assert "the heartbeat of 127.0.0.1:1 met an unexpected error and goes on after 5 s" in capsys.readouterr().err
