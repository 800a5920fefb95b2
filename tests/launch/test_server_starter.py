"""Tests of the fork server, which the servers of a machine are forked from."""

import errno
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from coordinator.errors import LaunchError
from coordinator.launch.fork_server import ForkServer
from coordinator.launch.server_process import LocalServers, ServerProcess, free_addresses
from coordinator.launch.server_starter import UNKNOWN_EXIT_CODE, ForkedProcess
from tests.deadline import wait_until
from tests.launch.conftest import Tasks
from tests.launch.forked import is_same_program

TIMEOUT = 60.0

# Loaded as soon as a test opens the pipe for writing.
WAITS = "import pathlib\npathlib.Path(__file__).with_name('pipe').read_text()\n"


def process(server: ServerProcess) -> psutil.Process:
    assert server.pid is not None
    return psutil.Process(server.pid)


def fork_servers() -> list[psutil.Process]:
    # `process_iter` passes over processes that end before they are read.
    wanted = {"name": "fork-server", "ppid": os.getpid()}
    return [each for each in psutil.process_iter([*wanted]) if each.info == wanted]


def is_forked(server: ServerProcess) -> bool:
    parent = process(server).parent()
    return parent is not None and is_same_program(process(server).pid, parent.pid)


def test_servers_have_one_parent_and_separate_sessions_tasks_and_folders(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [tasks.server(0), tasks.server(1, CUDA_VISIBLE_DEVICES="1")]
    servers[0].start()
    monkeypatch.chdir(tmp_path)
    servers[1].start()
    for server in servers:
        server.wait_ready(TIMEOUT)
        assert is_forked(server)
        assert os.getsid(server.pid or 0) == server.pid
        assert process(server).name() == f"worker-{server.config.index}"
        assert " ".join(process(server).cmdline()).rstrip() == f"coordinator worker {server.config.index}"
    assert process(servers[0]).ppid() == process(servers[1]).ppid()
    assert process(servers[1]).cwd() == str(tmp_path)
    assert not (tmp_path / "fork-server.log").read_text()
    # They outlive the fork server, and start again from another one.
    before = process(servers[0]).parent()
    assert before is not None
    before.kill()
    wait_until(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE)
    assert servers[0].is_alive()
    servers[0].kill()
    assert servers[0].exit_code == UNKNOWN_EXIT_CODE
    servers[0].start()
    servers[0].wait_ready(TIMEOUT)
    assert process(servers[0]).ppid() not in (before.pid, os.getpid())


def test_a_fork_server_killed_while_it_loads_is_started_again_for_its_servers(tasks: Tasks) -> None:
    os.mkfifo(tasks.package / "pipe")
    tasks.load(begin=WAITS)
    servers = [tasks.server(0), tasks.server(1)]
    for server in servers:
        server.start()
    wait_until(fork_servers)
    [killed] = fork_servers()
    killed.kill()
    wait_until(lambda: [each for each in fork_servers() if each != killed])
    (tasks.package / "pipe").write_text("")
    for server in servers:
        server.wait_ready(TIMEOUT)
        assert "the fork server ended by SIGKILL" in server.log_path.read_text().splitlines()[0]
    assert process(servers[0]).ppid() == process(servers[1]).ppid()
    assert len(fork_servers()) == 1


def test_closing_does_not_wait_until_tensorflow_is_loaded(tasks: Tasks) -> None:
    os.mkfifo(tasks.package / "pipe")
    tasks.load(begin=WAITS)
    servers = LocalServers({"worker": free_addresses(1)}, tasks.folder, tasks.environment)
    servers.start()
    servers.close()
    assert not servers["worker", 0].is_alive()
    assert servers["worker", 0].pid is None
    with pytest.raises(LaunchError, match="closed"):
        servers["worker", 0].start()


def test_servers_and_fork_server_end_with_a_killed_process(tasks: Tasks) -> None:
    program = """
        import os, pathlib, psutil, signal
        from coordinator.launch.server_process import free_addresses
        from coordinator.launch.server_process import ServerProcess
        from coordinator.launch.task_config import TaskConfig
        from coordinator.launch.server_starter import ForkServerProcess
        config = TaskConfig({"worker": free_addresses(1)}, "worker", 0)
        fork_server = ForkServerProcess(pathlib.Path("fork-server.log"))
        server = ServerProcess(config, pathlib.Path(), os.environ, fork_server)
        server.start()
        server.wait_ready(60)
        server.send(signal.SIGSTOP)
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        input()
    """
    folders = os.pathsep.join([os.environ["PYTHONPATH"], tasks.environment["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**tasks.environment, "PYTHONPATH": folders},
        cwd=tasks.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as starter:
        assert starter.stdout is not None
        started = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
    assert len(started) == 2
    assert not psutil.wait_procs(started, timeout=TIMEOUT)[1]


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
