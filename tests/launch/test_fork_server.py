import errno
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from coordinator.launch.fork_server import ForkServer
from coordinator.launch.server_starter import UNKNOWN_EXIT_CODE, ForkedProcess


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
