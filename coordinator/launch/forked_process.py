"""A server that a zygote forks for this process, or has forked.

Its parent is the zygote, so this process cannot wait for it as for a child. It sees the end by a descriptor of the
process, which never means another process, as an id may that was used again; the zygote tells the exit code.

    asked for  ->  begun: the zygote told its id, and handed over its descriptor  ->  ended: the zygote told its code

It promises that every method may be called from several threads.
"""

import os
import pathlib
import select
import signal
import socket
import threading
import time

# What `asyncio`, too, gives for a child whose exit code nobody can tell.
UNKNOWN_EXIT_CODE = 255

# How often a process that is being stopped is looked at, in seconds.
_STOP_INTERVAL = 0.002
_LONGEST_MESSAGE = 64


class ForkedProcess:
    """A process with a session of its own.

    Args:
      report: where the zygote tells, in one message each, that the process began, and how it ended. It is closed here.
    """

    def __init__(self, report: socket.socket):
        self._report = report
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._descriptor = -1
        self._exit_code: int | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it has not begun."""
        return self._pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Returns:
          Its exit code (minus the signal that killed it), or None if it did not end in time. `UNKNOWN_EXIT_CODE` if the
          zygote ended before it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._exit_code is None and self._wait_change(deadline):
            self._take_change()
        return self._exit_code

    def wait_begun(self) -> None:
        """Waits until the process has begun; it ends without having begun only if the zygote does."""
        while self._pid is None and self._exit_code is None and self._wait_change(None):
            self._take_change()

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it is gone."""
        with self._lock:
            if self._exit_code is None and self._pid is None:
                # To the zygote, which may be forking it just now, this says that nobody wants it any more.
                self._report.shutdown(socket.SHUT_WR)
        self._signal(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, to nobody if the process has ended. A process that SIGSTOP stopped has stopped on return."""
        self.wait_begun()
        self._signal(number)
        if number is signal.SIGSTOP:
            # The signal is delivered to the process's threads one by one: only now is it sure that none answers.
            while not self._is_stopped() and self.wait(_STOP_INTERVAL) is None:
                continue

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._exit_code is None and self._pid is not None:
                signal.pidfd_send_signal(self._descriptor, number)

    def _is_stopped(self) -> bool:
        """Whether every thread is."""
        tasks = pathlib.Path(f"/proc/{self._pid}/task")
        try:
            # After the name, which is in brackets and may hold any character, comes the state.
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread ended while it was looked at.
            return False
        return set(states) == {"T"}

    def _wait_change(self, deadline: float | None) -> bool:
        """Waits until the process begins, or, if it has, until it ends; returns whether it did."""
        with self._lock:
            if self._exit_code is not None:
                return True
            # A descriptor of this call's own: another thread may see the change first, and close the shared one.
            watched = os.dup(self._report.fileno() if self._pid is None else self._descriptor)
        try:
            return _is_readable(watched, deadline)
        finally:
            os.close(watched)

    def _take_change(self) -> None:
        with self._lock:
            if self._exit_code is not None:
                return
            if self._pid is None:
                self._take_beginning()
            elif _is_readable(self._descriptor, time.monotonic()):
                # The zygote is told of the end when this process is: its message comes in a moment.
                code = _receive(self._report)[0]
                self._end(UNKNOWN_EXIT_CODE if code is None else code)

    def _take_beginning(self) -> None:
        if not _is_readable(self._report.fileno(), time.monotonic()):
            return
        pid, descriptors = _receive(self._report)
        if pid is None:
            self._end(UNKNOWN_EXIT_CODE)
        else:
            self._pid, [self._descriptor] = pid, descriptors

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._report.close()
        if self._pid is not None:
            os.close(self._descriptor)


def _receive(report: socket.socket) -> tuple[int | None, list[int]]:
    """Returns the number in the next message, and its descriptors; no number if the zygote has ended."""
    try:
        message, descriptors, *_ = socket.recv_fds(report, _LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None, []
    return (int(message) if message else None), descriptors


def _is_readable(descriptor: int, deadline: float | None) -> bool:
    """Waits until there is something to read, or the other side is gone; returns whether that came to be in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
    return bool(poll.poll(timeout))
