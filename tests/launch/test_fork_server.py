import errno
import os
import signal
import socket
from pathlib import Path

import pytest

from coordinator.launch.fork_server import ForkServer
from coordinator.launch.server_starter import UNKNOWN_EXIT_CODE, ForkedProcess


def test_a_server_that_cannot_be_forked_has_ended_and_its_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    control, other_end = socket.socketpair()
    report, fork_server_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkedProcess(report)
    assert server.wait(0) is None
    with control, other_end, (tmp_path / "log").open("wb") as log:
        ForkServer(control).fork({}, -1, log.fileno(), fork_server_report)
    assert server.wait(30.0) == UNKNOWN_EXIT_CODE
    assert server.pid is None
    assert "no process could be forked for this server" in (tmp_path / "log").read_text()


def test_a_server_whose_report_was_shut_down_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    control, other_end = socket.socketpair()
    report, fork_server_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report.shutdown(socket.SHUT_WR)
    server = ForkedProcess(report)
    with control, other_end:
        ForkServer(control).fork({}, -1, -1, fork_server_report)
    assert server.wait(30.0) == -signal.SIGKILL
    assert server.pid is None
