"""The client's end of its heartbeat process: starts it, tells it what it does not know yet, hears it, ends it."""

import contextlib
import ctypes
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.heartbeat.heartbeat_process import MESSAGE_BYTES, MESSAGE_DESCRIPTORS

# So that no message is too long to be sent.
_MESSAGE_ADDRESSES = 500
_TRACE_SCOPE = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

Duplicate = Callable[[int], socket.socket | None]


class HeartbeatChild:
    """One run of `coordinator.heartbeat.heartbeat_process`. One thread at a time may use it.

    It ends by itself when this process does. It is in a session of its own, so that a terminal's Ctrl-C does not reach
    it, and looks for modules where this process does.

    Args:
      interval: from one probe of a server to the next, in seconds.
      timeout: a probe that is unanswered for so long finds the server silent, in seconds.

    Raises:
      OSError: it cannot be started.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._link, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._watched: dict[str, int] = {}
        self._passed: dict[int, int] = {}
        try:
            with its_end:
                self._process = subprocess.Popen(
                    _command(its_end, interval, timeout),
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
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor that can be read when it has said something, or has ended."""
        return self._link.fileno()

    def tell(self, watched: Mapping[str, int], connections: Mapping[int, int], duplicate: Duplicate) -> bool:
        """Tells it what changed since the last time, without waiting.

        Args:
          watched: the addresses to be watched, with a number for each, which is used for no other one ever.
          connections: the number of the address that each open connection leads to, by the connection's identity.
          duplicate: makes a duplicate of a connection, by its identity; None if it was closed meanwhile.

        Returns:
          Whether it was told all. If not, it has not read the earlier messages yet, or has ended: say it again later.
        """
        closed = [identity for identity, number in self._passed.items() if connections.get(identity) != number]
        opened = [identity for identity in connections if identity not in self._passed or identity in closed]
        return (
            self._tell_servers(watched)
            and all(self._tell_closed(some) for some in _batches(closed, _MESSAGE_ADDRESSES))
            and all(
                self._pass_on({identity: connections[identity] for identity in some}, duplicate)
                for some in _batches(opened, MESSAGE_DESCRIPTORS)
            )
        )

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns what it has said since the last time, without waiting; None if it has ended."""
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
        """Ends it, and returns its exit code.

        Args:
          timeout: how long it may take to end by itself, in seconds; then it is killed.
        """
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        self._process.kill()
        return self._process.wait()

    def __repr__(self) -> str:
        return f"<HeartbeatChild {self.pid}: {len(self._watched)} servers, {len(self._passed)} connections>"

    def _tell_servers(self, watched: Mapping[str, int]) -> bool:
        new = [address for address, number in watched.items() if self._watched.get(address) != number]
        old = [address for address, number in self._watched.items() if watched.get(address) != number]
        # It forgets an address before it watches it anew.
        for some in _batches(old, _MESSAGE_ADDRESSES):
            if not self._send(forget=[self._watched[address] for address in some]):
                return False
            for address in some:
                del self._watched[address]
        for some in _batches(new, _MESSAGE_ADDRESSES):
            if not self._send(watch=[(watched[address], address) for address in some]):
                return False
            self._watched |= {address: watched[address] for address in some}
        return True

    def _tell_closed(self, identities: Sequence[int]) -> bool:
        is_told = self._send(closed=identities)
        if is_told:
            for identity in identities:
                del self._passed[identity]
        return is_told

    def _pass_on(self, connections: Mapping[int, int], duplicate: Duplicate) -> bool:
        with contextlib.ExitStack() as duplicates:
            handles = {identity: duplicate(identity) for identity in connections}
            opened = {
                identity: duplicates.enter_context(handle) for identity, handle in handles.items() if handle is not None
            }
            said = [(identity, connections[identity]) for identity in opened]
            if not self._send([*opened.values()], opened=said):
                return False
        self._passed.update(said)
        return True

    def _send(self, handles: Sequence[socket.socket] = (), **message: Any) -> bool:
        try:
            socket.send_fds(self._link, [json.dumps(message).encode()], [handle.fileno() for handle in handles])
        except OSError:
            return False
        return True


def _command(link: socket.socket, interval: float, timeout: float) -> list[str]:
    # -P: the folder of this package has modules that are named like ones of Python, and must not go before them.
    command = [sys.executable, "-P", "-m", "coordinator.heartbeat.heartbeat_process", "--client", str(os.getpid())]
    return [*command, "--link", str(link.fileno()), "--interval", str(interval), "--timeout", str(timeout)]


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _allow_tracing(process: int) -> None:
    """Lets a child have duplicates of descriptors of this process, where Linux reserves that to a process's parents."""
    with contextlib.suppress(OSError):
        if _TRACE_SCOPE.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, process, 0, 0, 0)
