"""Watches the servers, and ends calls to servers that fall silent.

A call to a frozen server, or to a host that is gone, would never return, because the connection looks alive. The
heartbeat shuts the connection down, so the call fails as if the server had been killed.

    client                                                 heartbeat process
    user's and workers' threads -- state
    coordinator-heartbeat -- watch, forget, connections --> probes every server; shuts down the
                          <------- changes of state ------- connections to silent servers

The client's thread finds connections and passes duplicates of them to the process. The process acts without the client,
because the call that must be ended may block all threads of the client.

The heartbeat ends only calls of this process. A worker's call to a frozen parameter server does not end. The client's
call to that worker ends when the connection to the worker is shut down too (`OpenConnections.shut_down`).

Guarantees: no method waits for a server, or for a thread that waits for a server. A heartbeat process that dies is
restarted. `close` ends the thread and the process.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import logging
import math
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coordinator.addresses import parse_address
from coordinator.background_thread import BackgroundThread
from coordinator.heartbeat.heartbeat_process import MESSAGE_BYTES, MESSAGE_DESCRIPTORS, Liveness, ServerState
from coordinator.heartbeat.open_connections import EndpointLookup, OpenConnections
from coordinator.heartbeat.probes import Obstacle

_logger = logging.getLogger("coordinator")

# Keeps each message shorter than `MESSAGE_BYTES`.
_MESSAGE_ADDRESSES = 500
_TRACE_SCOPE = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

Duplicate = Callable[[int], socket.socket | None]


class HeartbeatClient:
    """One run of `coordinator.heartbeat.heartbeat_process`. Only one thread at a time may use it.

    The heartbeat process ends when this process ends. A separate session protects the heartbeat process from Ctrl-C.
    Both processes have the same module search path. For arguments see `Heartbeat`. Raises OSError if the start fails.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._link, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._watched: dict[str, int] = {}
        self.passed: dict[int, int] = {}
        # With -P, modules in the current folder do not take precedence over Python's modules of the same name.
        command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
        command += ["-m", "coordinator.heartbeat.heartbeat_process", "--client", str(os.getpid())]
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
        return self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when the process sends something or ends."""
        return self._link.fileno()

    def update(self, watched: Mapping[str, int], connections: Mapping[int, int], duplicate: Duplicate) -> bool:
        """Sends the changes since the last call, without waiting; returns whether all changes were sent.

        If False, the process has not read earlier messages yet, or has ended; call `update` again. `watched` maps
        addresses to numbers that no other address ever has, `connections` maps each connection's identity to its
        address's number. `duplicate` returns a duplicate of a connection, or None if the connection was closed.
        """
        forgotten = {address: number for address, number in self._watched.items() if watched.get(address) != number}
        closed = {
            identity: (identity, number)
            for identity, number in self.passed.items()
            if connections.get(identity) != number
        }
        try:
            for address in self._send_batches("forget", forgotten):
                del self._watched[address]
            # An address that was watched with another number is new, too.
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
        """Ends the process, or kills it after `timeout` seconds; returns its exit code."""
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
        """Sends the values of some entries in batches; yields the keys of each batch after the batch was sent."""
        for keys in _batches(list(entries), _MESSAGE_ADDRESSES):
            self._send(**{kind: [entries[key] for key in keys]})
            yield from keys

    def _send(self, handles: Sequence[socket.socket] = (), **message: Any) -> None:
        socket.send_fds(self._link, [json.dumps(message).encode()], [handle.fileno() for handle in handles])


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _allow_tracing(process: int) -> None:
    """Lets a child process duplicate this process's descriptors if Linux allows this only to ancestors."""
    with contextlib.suppress(OSError):
        if _TRACE_SCOPE.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, process, 0, 0, 0)


# The interval of searches for connections while a server is silent: a call blocks until the call's connection is found.
_SILENT_INTERVAL = 0.1
# A failed process is restarted after a pause in seconds, which doubles from `_FIRST_PAUSE` to `_LONGEST_PAUSE`.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 60.0
_END_TIMEOUT = 5.0
_UNKNOWN = ServerState(Liveness.UNKNOWN)


class Heartbeat:
    """Reports which servers answer, and shuts down the connections to servers that neither answer nor refuse.

    Every method may be called on any thread. `interval` is the time between two probes of a server; a server is silent
    when a probe has been unanswered for `timeout`. Both are in seconds.
    """

    def __init__(self, interval: float = 1.0, timeout: float = 5.0) -> None:
        self._interval = interval
        self._timeout = timeout
        # Guards changes of the next three attributes, which are read without the lock. No number is used twice. If an
        # address is forgotten and watched again, a late message has the old number and is ignored.
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._watched: dict[str, int] = {}
        self._states: dict[str, ServerState] = {}
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        # Only the heartbeat's thread uses the following attributes.
        self.process: HeartbeatClient | None = None
        self._connections = OpenConnections()
        self._lookup = EndpointLookup()
        self._pause = _FIRST_PAUSE
        self._start_at = 0.0
        self._thread = BackgroundThread("coordinator-heartbeat", self._run, finish=self._release)
        self._thread.start()

    def watch(self, address: str) -> None:
        """Begins to watch a server at `host:port`, unless it is watched. Raises ValueError for an invalid address."""
        parse_address(address)
        with self._lock:
            if address not in self._watched:
                self._watched[address] = next(self._numbers)
        self._wake()

    def forget(self, address: str) -> None:
        """Stops watching a server, if it is watched. Connections to the server stay open."""
        with self._lock:
            self._watched.pop(address, None)
            self._states.pop(address, None)
        self._wake()

    def state(self, address: str) -> ServerState:
        """Returns the last known state of a server."""
        return self._states.get(address, _UNKNOWN)

    def close(self) -> None:
        """Ends the thread and the process. A second call does nothing."""
        self._thread.stop()
        self._wake()
        if not self._thread.wait_stopped(2 * _END_TIMEOUT):
            _logger.warning("The heartbeat's thread is resolving a host name; closing does not wait for it.")

    def __repr__(self) -> str:
        states = ", ".join(f"{address} {self.state(address).liveness.value}" for address in self._watched)
        return f"<Heartbeat: {states or 'watches nothing'}>"

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self._ensure_process()
            self._pass_on()
            is_urgent = self.process is None or any(
                state.liveness is Liveness.SILENT for state in list(self._states.values())
            )
            self._wait(min(self._interval, _SILENT_INTERVAL) if is_urgent else self._interval)
            self._receive()

    def _release(self) -> None:
        if self.process is not None:
            self.process.end(_END_TIMEOUT)
        self._wakeup.close()
        self._wakeup_end.close()

    def _wake(self) -> None:
        """Wakes the thread. A full buffer wakes the thread anyway. A closed socket means that the thread has ended."""
        with contextlib.suppress(OSError):
            self._wakeup.send(b"\0")

    def _wait(self, timeout: float) -> None:
        sources: list[Any] = [self._wakeup_end, *([self.process] if self.process is not None else [])]
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        poll.poll(timeout * 1000)
        with contextlib.suppress(BlockingIOError):
            self._wakeup_end.recv(4096)

    def _ensure_process(self) -> None:
        if self.process is not None or time.monotonic() < self._start_at:
            return
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        try:
            self.process = HeartbeatClient(self._interval, self._timeout)
        except OSError as error:
            _logger.warning(
                "The heartbeat process could not be started (%s); another attempt follows in %.1f s. Until then calls "
                "to servers that freeze do not end.",
                error,
                self._pause,
            )

    def _receive(self) -> None:
        if self.process is None:
            return
        messages = self.process.receive()
        if messages is None:
            process, self.process = self.process, None
            code = process.end(_END_TIMEOUT)
            _logger.warning("The heartbeat process (%d) ended with code %d; it is restarted.", process.pid, code)
            return
        if messages:
            self._pause = _FIRST_PAUSE
        for message in messages:
            obstacle = Obstacle[message["obstacle"]] if message["obstacle"] else None
            state = ServerState(Liveness(message["liveness"]), message["incarnation"], message["since"], obstacle)
            self._set_state(message["number"], state)

    def _set_state(self, number: int, state: ServerState) -> None:
        with self._lock:
            address = next((name for name, known in self._watched.items() if known == number), None)
            if address is None:
                return
            before = self.state(address)
            if (before.liveness, before.incarnation) == (state.liveness, state.incarnation):
                return
            is_silent, was_silent = state.liveness is Liveness.SILENT, before.liveness is Liveness.SILENT
            last_silence = math.inf if is_silent else state.since if was_silent else before.last_silence
            self._states[address] = dataclasses.replace(state, last_silence=last_silence)
        if is_silent:
            why = state.obstacle.value if state.obstacle else "the cause is not known"
            text = "%s has not answered for %g s: %s. Calls to it fail until it answers."
            _logger.warning(text, address, self._timeout, why)
        elif was_silent:
            seconds = state.since - before.since + self._timeout
            how = "answers again" if state.liveness is Liveness.ANSWERING else "is gone"
            _logger.warning("%s %s after %.1f s of silence.", address, how, seconds)

    def _pass_on(self) -> None:
        if self.process is None:
            return
        with self._lock:
            watched = dict(self._watched)
        owners = self._lookup.owners(watched)
        open_now = {connection.identity: connection for connection in self._connections.find(owners)} if owners else {}
        self.process.update(
            watched,
            {identity: watched[owners[connection.peer]] for identity, connection in open_now.items()},
            lambda identity: self._connections.duplicate(open_now[identity]),
        )
        self._lookup.renew()
