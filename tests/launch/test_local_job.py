import os
import pathlib
import signal
import sys

import pytest

from coordinator.errors import LaunchError
from coordinator.launch.local_job import LocalJob
from coordinator.launch.program_process import Console
from coordinator.launch.run_request import RunRequest
from coordinator.launch.server_process import LocalServers


@pytest.fixture
def job(tmp_path: pathlib.Path) -> LocalJob:
    program = tmp_path / "program.py"
    program.touch()
    return LocalJob(RunRequest(program=str(program)), tmp_path, os.environ, Console(sys.stdout, sys.stderr))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_start_of_a_server_ends_the_run(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, exit_code: int
) -> None:
    def fail(_: LocalServers) -> None:
        os.kill(os.getpid(), number)
        raise LaunchError("The server could not be started: Broken pipe.")

    monkeypatch.setattr(LocalServers, "start", fail)
    assert job.run() == exit_code


def test_an_unexpected_error_of_a_thread_ends_the_run(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(LocalServers, "start", lambda _: None)
    monkeypatch.setattr(LocalServers, "__iter__", lambda _: iter(()))
    monkeypatch.setattr(LocalServers, "wait_ready", fail)
    with pytest.raises(OSError, match="too many open files"):
        job.run()
