"""The zygote of this process's local servers (`zygote.py` is what runs in it).

It promises that the zygote starts with the first server, begins anew if somebody killed it, and ends with this process
or when it is closed.
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

from coordinator.errors import LaunchError
from coordinator.launch.forked_process import ForkedProcess


class ZygoteProcess:
    """Forks servers on request, from any thread.

    Args:
      log_path: the file that takes what the zygote itself prints.
    """

    def __init__(self, log_path: pathlib.Path):
        self._log_path = log_path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @staticmethod
    def is_supported() -> bool:
        """Whether this machine can have one: it takes Linux, 5.3 or later."""
        if sys.platform != "linux":
            return False
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return False
        return True

    def start_server(self, environment: Mapping[str, str], *, standard_input: int, log: int) -> ForkedProcess:
        """Asks for a server, and returns at once; while the zygote loads TensorFlow, the server waits for it.

        Args:
          environment: the server's environment. The first one is the zygote's too; a server with another one, other
            than in what describes its task, is started as a fresh process.
          standard_input: the descriptor that the server reads, and at whose end it ends.
          log: the descriptor that it prints to.

        Raises:
          LaunchError: this is closed.
          OSError: the zygote could not be started, or ended just now.
        """
        report, zygote_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock, zygote_report:
                control = self._running(environment)
                _send_request(control, environment, standard_input, log, zygote_report.fileno())
        except BaseException:
            report.close()
            raise
        return ForkedProcess(report)

    def stop_loading(self) -> None:
        """Ends the zygote if it still loads TensorFlow: the servers that wait for it never begin then."""
        with self._lock:
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Ends the zygote and all its servers, frozen ones included, and returns when the zygote is gone."""
        with self._lock:
            self._is_closed = True
            self._end()

    def __repr__(self) -> str:
        process = self._process
        return f"ZygoteProcess({'not running' if process is None else f'process {process.pid}'})"

    def _running(self, environment: Mapping[str, str]) -> socket.socket:
        """Returns the control of the zygote, started now if it does not run."""
        if self._is_closed:
            raise LaunchError("The servers are closed; none is started any more.")
        if self._process is None or self._process.poll() is not None:
            mode = "wb" if self._process is None else "ab"
            self._end()
            with self._log_path.open(mode) as log:
                self._control = self._start(environment, log.fileno())
        assert self._control is not None
        return self._control

    def _start(self, environment: Mapping[str, str], log: int) -> socket.socket:
        control, zygote_control = socket.socketpair()
        try:
            with zygote_control:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "coordinator.launch.fork_server"],
                    stdin=zygote_control.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError:
            control.close()
            raise
        return control

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
