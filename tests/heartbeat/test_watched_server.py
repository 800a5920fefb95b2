"""Tests of what is reported about a server, with probes whose outcomes a test decides."""

import asyncio
import types
from typing import ClassVar

import pytest

from coordinator.heartbeat import heartbeat_process
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState, WatchedServer
from coordinator.heartbeat.probes import Obstacle, TaskStatus

TIMEOUT = 0.01


class FakeProbe:
    """Returns one outcome after another, then ends the watching.

    Attributes:
      outcomes: a status; None, refused; or how many seconds late a time-out is noticed.
      now: the time, which passes while a server does not answer, and never else.
    """

    outcomes: ClassVar[list[TaskStatus | float | None]] = []
    now: ClassVar[float] = 0.0

    def __init__(self, address: str) -> None: ...

    async def __aenter__(self) -> "FakeProbe":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def status(self, timeout: float) -> TaskStatus | None:
        if not self.outcomes:
            raise asyncio.CancelledError
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, float):
            FakeProbe.now += timeout + outcome
            raise TimeoutError
        return outcome


@pytest.mark.parametrize(
    ("outcomes", "reported"),
    [
        ([TaskStatus(7, ())], [(Liveness.ANSWERING, 7)]),
        ([TaskStatus(7, ()), TaskStatus(7, ()), TaskStatus(8, ())], [(Liveness.ANSWERING, 7), (Liveness.ANSWERING, 8)]),
        ([None], [(Liveness.GONE, None)]),
        ([0.0], [(Liveness.SILENT, None)]),
        ([TaskStatus(7, ()), 2.0, TaskStatus(7, ())], [(Liveness.ANSWERING, 7)]),
    ],
    ids=["answering", "restarted", "gone", "silent", "a pause of this process is not a silence of the server"],
)
def test_changes_are_reported(monkeypatch: pytest.MonkeyPatch, outcomes: list, reported: list) -> None:
    monkeypatch.setattr(heartbeat_process, "AsyncTaskProbe", FakeProbe)
    monkeypatch.setattr(heartbeat_process, "time", types.SimpleNamespace(monotonic=lambda: FakeProbe.now))
    monkeypatch.setattr(FakeProbe, "now", 0.0)
    monkeypatch.setattr(FakeProbe, "outcomes", list(outcomes))
    states: list[ServerState] = []
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(WatchedServer("127.0.0.1:1", 0.0, TIMEOUT, states.append).run())
    assert [(state.liveness, state.incarnation) for state in states] == reported
    obstacles = {state.obstacle for state in states if state.liveness is not Liveness.ANSWERING}
    assert obstacles <= {Obstacle.REFUSED}, "nothing listens on port 1"
