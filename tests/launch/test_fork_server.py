import errno
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from coordinator.background_thread import start_once
from coordinator.launch.fork_server import ForkServer
from coordinator.launch.server_starter import UNKNOWN_EXIT_CODE, ForkedProcess
from tests.deadline import wait_until


class Requested:
    """A fork server that takes a request of a server, and answers it only in `fork`."""

    is_closed = False

    def take(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        self.report = socket.socket(fileno=os.dup(descriptors[3]))

    def fork(self, log: int) -> None:
        control, other_end = socket.socketpair()
        with control, other_end:
            ForkServer(control).fork({}, -1, log, self.report)


def test_a_server_that_cannot_be_forked_has_ended_and_its_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    fork_server = Requested()
    with (tmp_path / "log").open("wb") as log:
        server = ForkedProcess(fork_server, {}, log.fileno())
        assert server.wait(0) is None
        fork_server.fork(log.fileno())
    assert server.wait(30.0) == UNKNOWN_EXIT_CODE
    assert server.pid is None
    assert "no process could be forked for this server" in (tmp_path / "log").read_text()


def test_a_server_whose_report_was_shut_down_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    fork_server = Requested()
    with (tmp_path / "log").open("wb") as log:
        server = ForkedProcess(fork_server, {}, log.fileno())
        killing = start_once("coordinator-test", server.kill)
        wait_until(lambda: select.select([fork_server.report], [], [], 0)[0])
        fork_server.fork(-1)
    killing.join(30.0)
    assert server.wait(30.0) == -signal.SIGKILL
    assert server.pid is None
