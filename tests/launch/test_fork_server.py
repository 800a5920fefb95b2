import errno
import os
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
        assert ForkServer(control).fork({}, -1, -1, log.fileno(), fork_server_report.detach()) is None
    assert server.wait(30.0) == UNKNOWN_EXIT_CODE
    assert server.pid is None
    assert "no process could be forked for this server" in (tmp_path / "log").read_text()
