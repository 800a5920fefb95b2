"""The client's end of its heartbeat process: starts it, updates it, receives its messages, ends it."""

import contextlib
import ctypes
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coordinator.heartbeat.heartbeat_process import MESSAGE_BYTES, MESSAGE_DESCRIPTORS

# Keeps each message shorter than `MESSAGE_BYTES`.
_MESSAGE_ADDRESSES = 500
_TRACE_SCOPE = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

Duplicate = Callable[[int], socket.socket | None]


class HeartbeatClient:
    """One run of `coordinator.heartbeat.heartbeat_process`. One thread at a time may use it.

    The process ends by itself when this one does. It is in a separate session, so that a terminal's Ctrl-C does not
    reach it, and has the same module search path as this process.

    Args:
      interval: from one probe of a server to the next, in seconds.
      timeout: a server is silent when a probe has been unanswered for this long, in seconds.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._link, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._watched: dict[str, int] = {}
        self.passed: dict[int, int] = {}
        # -P: the folder of this package has modules with names of Python's own, which must not take precedence.
        command = [sys.executable, "-P", "-m", "coordinator.heartbeat.heartbeat_process", "--client", str(os.getpid())]
        command += ["--link", str(its_end.fileno()), "--interval", str(interval), "--timeout", str(timeout)]
        try:
            with its_end:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                    pass_fds=[its_end.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._link.close()
            raise
        _allow_tracing(self._process.pid)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when the process sends something or ends."""
        return self._link.fileno()

    def update(self, watched: Mapping[str, int], connections: Mapping[int, int], duplicate: Duplicate) -> bool:
        """Sends what changed since the last time, without waiting.

        Args:
          watched: the addresses to be watched, with a number for each, which is never used for another one.
          connections: the number of the address that each open connection leads to, by the connection's identity.
          duplicate: returns a duplicate of a connection, given its identity; None if it was closed meanwhile.

        Returns:
          True if all was sent. If not, the process has not read earlier messages yet, or has ended: call it again.
        """
        forgotten = {each: number for each, number in self._watched.items() if watched.get(each) != number}
        closed = {each: (each, number) for each, number in self.passed.items() if connections.get(each) != number}
        try:
            for address in self._send_batches("forget", forgotten):
                del self._watched[address]
            # Also an address that was watched with another number.
            new = {address: (number, address) for address, number in watched.items() if address not in self._watched}
            for address in self._send_batches("watch", new):
                self._watched[address] = watched[address]
            for identity in self._send_batches("closed", closed):
                del self.passed[identity]
            opened = [identity for identity in connections if identity not in self.passed]
            for identities in _batches(opened, MESSAGE_DESCRIPTORS):
                self._pass_on({identity: connections[identity] for identity in identities}, duplicate)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived, without waiting; None if the process has ended."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                text = self._link.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError:
                return None
            if not text:
                return None
            messages.append(json.loads(text))

    def end(self, timeout: float) -> int:
        """Ends the process, and returns its exit code.

        Args:
          timeout: how long it may take to end by itself, in seconds; then it is killed.
        """
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        self._process.kill()
        return self._process.wait()

    def _pass_on(self, connections: Mapping[int, int], duplicate: Duplicate) -> None:
        with contextlib.ExitStack() as duplicates:
            handles = {identity: duplicate(identity) for identity in connections}
            opened = {
                identity: duplicates.enter_context(handle) for identity, handle in handles.items() if handle is not None
            }
            sent = [(identity, connections[identity]) for identity in opened]
            self._send([*opened.values()], opened=sent)
        self.passed.update(sent)

    def _send_batches(self, kind: str, entries: Mapping[Any, Any]) -> Iterator[Any]:
        """Sends the values of some entries; yields the keys of each batch once it was sent."""
        for keys in _batches(list(entries), _MESSAGE_ADDRESSES):
            self._send(**{kind: [entries[key] for key in keys]})
            yield from keys

    def _send(self, handles: Sequence[socket.socket] = (), **message: Any) -> None:
        socket.send_fds(self._link, [json.dumps(message).encode()], [handle.fileno() for handle in handles])


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _allow_tracing(process: int) -> None:
    """Lets a child duplicate descriptors of this process, where Linux reserves that to a process's ancestors."""
    with contextlib.suppress(OSError):
        if _TRACE_SCOPE.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, process, 0, 0, 0)
