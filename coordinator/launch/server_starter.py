"""Starts server processes by forking them from a fork server (`fork_server.py`).

A forked server's parent is the fork server, so this process cannot wait for the forked server as for a child. For each
server, a thread reads the reports about the server.

    requested  ->  begun: it reports its id  ->  ended: the fork server reports its exit code

Guarantees:

- The fork server starts with the first server, and ends when this process ends or closes it. If the fork server is
  killed, it is restarted, and servers that had not begun are requested again.
- If the exit code of a server is unknown, the server's log says why.
- Every method may be called from several threads.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

import psutil

from coordinator.background_thread import start_once
from coordinator.errors import LaunchError
from coordinator.launch.fork_server import UNKNOWN_EXIT_CODE

# How long the fork server may take to end its servers and itself, in seconds.
_END_TIMEOUT = 30.0
# The pause between two checks of a process that is being stopped, in seconds.
_STOP_INTERVAL = 0.002
_LONGEST_MESSAGE = 64
# The maximum number of requests for a server whose fork server ends before the server has begun.
_MOST_REQUESTS = 3
# How long a fork server may take to end after its last report, in seconds.
_REASON_TIMEOUT = 5.0
_TAIL_LINES = 8


def ending_of(code: int) -> str:
    """Describes how a process ended, by its exit code, such as `by SIGKILL` or `with code 1`."""
    if code >= 0:
        return f"with code {code}"
    by_whom = " (by the kernel, if memory ran out)" if -code == signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{by_whom}"


class ForkedProcess:
    """A process that a fork server forks, in its own session.

    If the fork server ends before the forked process has begun, the forked process is requested again. If this process
    ends first, the server finds its report closed and ends too.

    `log` is the descriptor that the forked process prints to; a duplicate is kept. `is_lost` is True if the forked
    process has ended with an unknown exit code; the log then says why. Raises LaunchError if the fork server is closed,
    OSError if the fork server cannot start.
    """

    def __init__(self, fork_server: "ForkServerProcess", environment: Mapping[str, str], log: int):
        self.is_lost = False
        self._fork_server = fork_server
        self._environment = environment
        self._is_killed = False
        # Guards `_report`, which is replaced with the fork server, and closed at the end of the forked process.
        self._lock = threading.Lock()
        self._has_begun = threading.Event()
        self._pid: int | None = None
        # Unlike a process id, which the kernel may use again, this object never refers to another process.
        self._process: psutil.Process | None = None
        self._exit_code: int | None = None
        with contextlib.ExitStack() as opened:
            self._log = os.dup(log)
            opened.callback(os.close, self._log)
            # The forked process must begin in this process's present folder, as a child process would.
            self._folder = os.open(".", os.O_PATH)
            opened.callback(os.close, self._folder)
            self._report, self._parent = self._requested()
            self._opened = opened.pop_all()
        self._thread = start_once("coordinator-forked-server", self._follow, lambda _: self._end(None))

    @property
    def pid(self) -> int | None:
        """The id of the process. Reading it waits until the process has begun; None if the fork server ended before."""
        self._has_begun.wait()
        return self._pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit code, or None after `timeout` seconds, or `UNKNOWN_EXIT_CODE` if the fork server ended."""
        self._thread.join(timeout)
        return self._exit_code

    def kill(self) -> None:
        """Ends the process with SIGKILL; returns when it is gone."""
        with self._lock:
            self._is_killed = True
            if not self._has_begun.is_set():
                # The fork server does not fork a server whose report is shut down.
                self._report.shutdown(socket.SHUT_WR)
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal unless the process has ended. After SIGSTOP, returns when the process has stopped."""
        self._has_begun.wait()
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)
        if number is signal.SIGSTOP:
            # The kernel stops the threads one by one, and a thread that has not stopped yet may still answer.
            while not self._is_stopped() and self.wait(_STOP_INTERVAL) is None:
                continue

    def _is_stopped(self) -> bool:
        tasks = pathlib.Path(f"/proc/{self._pid}/task")
        try:
            # The state follows the name, which is in brackets and may contain any character.
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread has ended since it was listed.
            return False
        return set(states) == {"T"}

    def _requested(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        report, fork_server_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with fork_server_report, contextlib.ExitStack() as opened:
                # The environment is sent as a file, because an environment may be longer than a message.
                content = os.memfd_create("environment")
                opened.callback(os.close, content)
                os.pwrite(content, json.dumps(dict(self._environment)).encode(), 0)
                descriptors = [content, self._folder, self._log, fork_server_report.fileno()]
                return report, self._fork_server.take(self._environment, descriptors)
        except BaseException:
            report.close()
            raise

    def _follow(self) -> None:
        for requests_left in reversed(range(_MOST_REQUESTS)):
            code = self._reported()
            if code is not None or not self._is_requested_again(requests_left):
                break
        self._end(code)

    def _end(self, code: int | None) -> None:
        with self._lock:
            self.is_lost = code is None
            self._exit_code = UNKNOWN_EXIT_CODE if code is None else code
            self._has_begun.set()
            self._report.close()
            self._opened.close()

    def _reported(self) -> int | None:
        """Reads the report to its end; returns the exit code, or None if the report has no exit code."""
        with contextlib.suppress(ConnectionResetError):
            while message := self._report.recv(_LONGEST_MESSAGE):
                event, number = message.split()
                if event == b"ended":
                    return int(number)
                self._pid = int(number)
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._process = psutil.Process(self._pid)
                self._has_begun.set()
        return None

    def _is_requested_again(self, requests_left: int) -> bool:
        """Requests the process from another fork server if the former one ended before the process had begun."""
        try:
            reason = f"the fork server ended {ending_of(self._parent.wait(_REASON_TIMEOUT))}"
        except subprocess.TimeoutExpired:
            reason = "the fork server ended its report"
        with self._lock:
            if requests_left and not (self._has_begun.is_set() or self._is_killed):
                with contextlib.suppress(LaunchError, OSError):
                    report, self._parent = self._requested()
                    self._report.close()
                    self._report = report
                    self._write_log(f"{reason} before this server began: both are started again.")
                    return True
        self._write_log(f"it is not known how this server ended, for {reason} before it.{self._fork_server.log_tail()}")
        return False

    def _write_log(self, text: str) -> None:
        """Adds a line to the server's log, unless the fork server was closed, which ends all servers."""
        if not self._fork_server.is_closed:
            # The write fails if the disk is full.
            with contextlib.suppress(OSError):
                os.write(self._log, f"coordinator: {text}\n".encode())


class ForkServerProcess:
    """The fork server of this process's local servers; it starts with the first server.

    `log_path` is the file for the fork server's own output. `is_closed` is True when no further server can be started.
    """

    def __init__(self, log_path: pathlib.Path):
        self._log_path = log_path
        self.is_closed = False
        self._lock = threading.Lock()
        # The connection to the fork server, and its process.
        self._started: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def start_server(self, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Requests a server that prints to the descriptor `log`, without waiting for it.

        The first server's environment is also the fork server's. A server becomes a fresh process if its environment
        differs in other variables than `_READ_LATE` (`fork_server.py`). Raises LaunchError if closed, OSError if the
        fork server cannot start.
        """
        return ForkedProcess(self, environment, log)

    def take(self, environment: Mapping[str, str], descriptors: list[int]) -> "subprocess.Popen[bytes]":
        """Starts the fork server if necessary, and sends a request's descriptors to it; returns its process."""
        with self._lock:
            for requests_left in reversed(range(_MOST_REQUESTS)):
                control, process = self._running(environment)
                try:
                    socket.send_fds(control, [b"s"], descriptors)
                    return process
                except (BrokenPipeError, ConnectionResetError):
                    # The fork server has just ended.
                    self._end()
                    if not requests_left:
                        raise
        raise AssertionError("the last request has returned or raised")

    def log_tail(self) -> str:
        """Returns a sentence with the end of the fork server's log."""
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text(errors="replace").splitlines()
            if lines:
                return "\n".join([" The log of the fork server ends with:", *lines[-_TAIL_LINES:]])
        return " The log of the fork server is empty."

    def close(self) -> None:
        """Ends the fork server and all its servers, frozen ones included; returns when the fork server is gone."""
        with self._lock:
            self.is_closed = True
            if self._started is not None:
                # SIGTERM ends a fork server that is loading TensorFlow. Servers that wait for it never begin.
                self._started[1].send_signal(signal.SIGTERM)
            self._end()

    def _running(self, environment: Mapping[str, str]) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        if self.is_closed:
            raise LaunchError("The servers are closed; none is started any more.")
        if self._started is not None and self._started[1].poll() is None:
            return self._started
        self._end()
        control, fork_server_control = socket.socketpair()
        try:
            with self._log_path.open("ab") as log, fork_server_control:
                process = subprocess.Popen(
                    [sys.executable, "-m", "coordinator.launch.fork_server"],
                    stdin=fork_server_control.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError:
            control.close()
            raise
        self._started = control, process
        return self._started

    def _end(self) -> None:
        if self._started is not None:
            control, process = self._started
            self._started = None
            control.close()
            try:
                process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                # The fork server is frozen. Its servers end when they find their standard input closed.
                process.kill()
                process.wait()
