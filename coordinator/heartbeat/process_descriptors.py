"""The sockets among the file descriptors of a process, this one or another, and duplicates of them.

Nothing here fails because a descriptor was closed meanwhile, or stands for something else now: a duplicate is told by
the identity of the socket. Another process's descriptors are Linux's, and need the right to trace that process.
"""

import contextlib
import ctypes
import os
import socket
import stat
import sys
from collections.abc import Iterator

# The number of the system call pidfd_getfd, which Python has no name for; the same on every machine.
_PIDFD_GETFD = 438


class ProcessDescriptors:
    """Lists and duplicates the sockets of a process.

    Args:
      process: its id; None for this one.
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = process
        owner = "self" if process is None else str(process)
        self._folder = f"/proc/{owner}/fd" if sys.platform == "linux" else "/dev/fd"

    def sockets(self) -> Iterator[tuple[int, int]]:
        """The identity and the descriptor of each socket.

        An identity is a number that no other open socket of this machine has; it survives duplication.
        """
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(f"{self._folder}/{name}")
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino, int(name)

    def duplicate(self, identity: int, descriptor: int) -> socket.socket | None:
        """Returns another handle to a socket, which the caller closes; None if it cannot be had any more, or at all."""
        try:
            copy = os.dup(descriptor) if self._process is None else _take(self._process, descriptor)
        except OSError:
            return None
        try:
            duplicate = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        if os.fstat(copy).st_ino != identity:
            duplicate.close()
            return None
        return duplicate


def _take(process: int, descriptor: int) -> int:
    """Duplicates a descriptor of another process into this one."""
    if sys.platform != "linux":
        raise OSError("Only Linux hands descriptors of one process to another.")
    handle = os.pidfd_open(process)
    try:
        copy = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, descriptor, 0))
    finally:
        os.close(handle)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return copy
