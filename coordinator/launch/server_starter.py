"""Starts server processes: they are forked from a fork server (`fork_server.py` runs in it).

A forked server's parent is the fork server, so this process cannot wait for it as for a child. A thread for each one
reads reports of it.

    requested  ->  begun: it reports its id  ->  ended: the fork server reports its exit code

It promises that the fork server starts with the first server, is started again if it was killed, and ends with this
process or when it is closed; and that every method may be called from several threads.
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

from coordinator.errors import LaunchError

# What `asyncio`, too, returns for a child whose exit code cannot be known.
UNKNOWN_EXIT_CODE = 255

# How long the fork server may take to end its servers and itself, in seconds.
_END_TIMEOUT = 30.0
# How often a process that is being stopped is looked at, in seconds.
_STOP_INTERVAL = 0.002
_LONGEST_MESSAGE = 64


class ForkedProcess:
    """A process that a fork server forks, in its own session.

    Args:
      report: where the process reports that it began, and the fork server how it ended. It is closed here when the
        process has ended; if this process ends first, the server reads its end and ends too.
    """

    def __init__(self, report: socket.socket):
        self._report = report
        # Guards the report, which is closed at the end of the process.
        self._lock = threading.Lock()
        self._has_begun = threading.Event()
        self._pid: int | None = None
        # Never means another process, as an id may that is used again.
        self._process: psutil.Process | None = None
        self._exit_code: int | None = None
        self._thread = threading.Thread(target=self._follow, name="coordinator-forked-server", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The id of the process, as soon as it has begun; None if the fork server ended before that."""
        self._has_begun.wait()
        return self._pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Returns:
          Its exit code (minus the signal that killed it), or None if it did not end in time. `UNKNOWN_EXIT_CODE` if the
          fork server ended before it.
        """
        self._thread.join(timeout)
        return self._exit_code

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it is gone."""
        with self._lock:
            if not self._has_begun.is_set():
                # The fork server forks no server whose report is shut down.
                self._report.shutdown(socket.SHUT_WR)
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal unless the process has ended. A process that SIGSTOP stopped has stopped on return."""
        self._has_begun.wait()
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)
        if number is signal.SIGSTOP:
            # The signal is delivered to the process's threads one by one: only now is it sure that none answers.
            while not self._is_stopped() and self.wait(_STOP_INTERVAL) is None:
                continue

    def _is_stopped(self) -> bool:
        """Returns True if every thread has stopped."""
        tasks = pathlib.Path(f"/proc/{self._pid}/task")
        try:
            # After the name, which is in brackets and may hold any character, comes the state.
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread ended while it was looked at.
            return False
        return set(states) == {"T"}

    def _follow(self) -> None:
        code = UNKNOWN_EXIT_CODE
        while message := self._report.recv(_LONGEST_MESSAGE):
            event, number = message.split()
            if event == b"ended":
                code = int(number)
                break
            self._pid = int(number)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(self._pid)
            self._has_begun.set()
        with self._lock:
            self._exit_code = code
            self._has_begun.set()
            self._report.close()


class ForkServerProcess:
    """The fork server of this process's local servers, which it starts when the first server is wanted.

    Args:
      log_path: the file that takes what the fork server itself prints.
    """

    def __init__(self, log_path: pathlib.Path):
        self._log_path = log_path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def start_server(self, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Requests a server, and returns at once; while the fork server loads TensorFlow, the server waits for it.

        Args:
          environment: the server's environment. The first one is also the fork server's; a server whose environment
            differs from that, other than in what describes its task, is started as a fresh process.
          log: the descriptor that it prints to.

        Raises:
          LaunchError: this is closed.
          OSError: the fork server could not be started, or ended just now.
        """
        report, fork_server_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock, fork_server_report:
                control = self._running(environment)
                _send_request(control, environment, log, fork_server_report.fileno())
        except BaseException:
            report.close()
            raise
        return ForkedProcess(report)

    def close(self) -> None:
        """Ends the fork server and all its servers, frozen ones included, and returns when the fork server is gone."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                # Ends it at once while it loads TensorFlow: the servers that wait for it never begin.
                self._process.send_signal(signal.SIGTERM)
            self._end()

    def _running(self, environment: Mapping[str, str]) -> socket.socket:
        """Returns the control of the fork server, started now if it does not run."""
        if self._is_closed:
            raise LaunchError("The servers are closed; none is started any more.")
        if self._process is None or self._process.poll() is not None:
            mode = "wb" if self._process is None else "ab"
            self._end()
            control, fork_server_control = socket.socketpair()
            try:
                with self._log_path.open(mode) as log, fork_server_control:
                    self._process = subprocess.Popen(
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
            self._control = control
        assert self._control is not None
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                # It is stopped. Its servers end when they find their standard input closed.
                self._process.kill()
                self._process.wait()
            self._process = None


def _send_request(control: socket.socket, environment: Mapping[str, str], log: int, report: int) -> None:
    with contextlib.ExitStack() as opened:
        # A file, as an environment may be longer than a message.
        request = os.memfd_create("environment")
        opened.callback(os.close, request)
        os.pwrite(request, json.dumps(dict(environment)).encode(), 0)
        # A child process would begin in the folder where this process is now.
        folder = os.open(".", os.O_PATH)
        opened.callback(os.close, folder)
        socket.send_fds(control, [b"s"], [request, folder, log, report])
