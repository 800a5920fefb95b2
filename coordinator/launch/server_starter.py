"""Starts server processes: forked from a fork server (`fork_server.py` runs in it), or as fresh processes.

A forked server's parent is the fork server, so this process cannot wait for it as for a child. A thread for each one
sees the end by a descriptor of the process, which never means another process, as an id may that is used again; the
fork server reports the exit code.

    requested  ->  begun: its id and descriptor are reported  ->  ended: its exit code is reported

It promises that the fork server starts with the first server, is started again if it was killed, and ends with this
process or when it is closed; and that every method may be called from several threads.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from coordinator.errors import LaunchError
from coordinator.launch.serve import SERVE_COMMAND

# What `asyncio`, too, returns for a child whose exit code cannot be known.
UNKNOWN_EXIT_CODE = 255

# How often a process that is being stopped is looked at, in seconds.
_STOP_INTERVAL = 0.002
_LONGEST_MESSAGE = 64


class FreshProcess:
    """A child process of this one, in its own session.

    Args:
      environment: its environment.
      standard_input: the descriptor that it reads, and at whose end it ends.
      log: the descriptor that it prints to.

    Raises:
      OSError: it could not be started.
    """

    def __init__(self, environment: Mapping[str, str], *, standard_input: int, log: int):
        self._process = subprocess.Popen(
            SERVE_COMMAND,
            stdin=standard_input,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process, at most `timeout` seconds, and returns its exit code, or None."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal unless the process has ended. A process that SIGSTOP stopped has stopped on return."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP and self._process.poll() is None:
            # The signal is delivered to the process's threads one by one: only now is it sure that none answers.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class ForkedProcess:
    """A process that a fork server forks, in its own session.

    Args:
      report: where the fork server reports, in one message each, that the process began, and how it ended. It is closed
        here.
    """

    def __init__(self, report: socket.socket):
        self._report = report
        # Guards the report and the descriptor, which are closed at the end of the process.
        self._lock = threading.Lock()
        self._has_begun = threading.Event()
        self._pid: int | None = None
        self._descriptor = -1
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
            if self._exit_code is None and self._pid is None:
                # The fork server, which may be forking it just now, kills a server whose report is closed.
                self._report.shutdown(socket.SHUT_WR)
        self._signal(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal unless the process has ended. A process that SIGSTOP stopped has stopped on return."""
        self._has_begun.wait()
        self._signal(number)
        if number is signal.SIGSTOP:
            # The signal is delivered to the process's threads one by one: only now is it sure that none answers.
            while not self._is_stopped() and self.wait(_STOP_INTERVAL) is None:
                continue

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._exit_code is None and self._pid is not None:
                with contextlib.suppress(ProcessLookupError):  # It has ended just now.
                    signal.pidfd_send_signal(self._descriptor, number)

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
        code = None
        pid, descriptors = _receive(self._report)
        if pid is not None:
            with self._lock:
                self._pid, [self._descriptor] = pid, descriptors
            self._has_begun.set()
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll()
            # The fork server sees the end when this process does: its message comes in a moment.
            code, _ = _receive(self._report)
        with self._lock:
            self._exit_code = UNKNOWN_EXIT_CODE if code is None else code
            self._report.close()
            if pid is not None:
                os.close(self._descriptor)
        self._has_begun.set()


def _receive(report: socket.socket) -> tuple[int | None, list[int]]:
    """Returns the number in the next message, and its descriptors; no number if the fork server has ended."""
    try:
        message, descriptors, *_ = socket.recv_fds(report, _LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None, []
    return (int(message) if message else None), descriptors


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

    @staticmethod
    def is_supported() -> bool:
        """Returns True if this machine can have a fork server, which takes Linux 5.3 or later."""
        if sys.platform != "linux":
            return False
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return False
        return True

    def start_server(self, environment: Mapping[str, str], *, standard_input: int, log: int) -> ForkedProcess:
        """Requests a server, and returns at once; while the fork server loads TensorFlow, the server waits for it.

        Args:
          environment: the server's environment. The first one is also the fork server's; a server whose environment
            differs from that, other than in what describes its task, is started as a fresh process.
          standard_input: the descriptor that the server reads, and at whose end it ends.
          log: the descriptor that it prints to.

        Raises:
          LaunchError: this is closed.
          OSError: the fork server could not be started, or ended just now.
        """
        report, fork_server_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock, fork_server_report:
                control = self._running(environment)
                _send_request(control, environment, standard_input, log, fork_server_report.fileno())
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
            self._process.wait()
            self._process = None


def _send_request(
    control: socket.socket, environment: Mapping[str, str], standard_input: int, log: int, report: int
) -> None:
    with contextlib.ExitStack() as opened:
        # A file, as an environment may be longer than a message.
        request = os.memfd_create("environment")
        opened.callback(os.close, request)
        os.pwrite(request, json.dumps(dict(environment)).encode(), 0)
        # A child process would begin in the folder where this process is now.
        folder = os.open(".", os.O_PATH)
        opened.callback(os.close, folder)
        socket.send_fds(control, [b"s"], [request, folder, standard_input, log, report])
