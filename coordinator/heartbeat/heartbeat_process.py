"""A process that probes a client's servers, and shuts down the client's connections to servers that fall silent.

    python -m coordinator.heartbeat.heartbeat_process --client ID --link DESCRIPTOR --interval SECONDS --timeout SECONDS

A separate process is needed because the call that must be ended may block all threads of the client, with Python's
global lock held. The link is a socket that preserves message boundaries. The client sends any of

    {"forget": [number, ...]}
    {"watch": [[number, address], ...]}
    {"closed": [[identity, number], ...]}
    {"opened": [[identity, number], ...]}       with a descriptor for each of these connections

and receives `{"number": ..., "liveness": ..., "incarnation": ..., "since": ..., "obstacle": ...}` for every change.

While a server is silent, the client may open new connections to the server, and may block before it has passed them on.
If the system lets a process duplicate another process's descriptors (`OpenConnections`), this process fetches these
connections. If not, the blocked call lasts until gRPC gives up connecting, after 20 seconds.

Guarantees:

- The process ends when the client's end of the link is closed or the client is gone. It ignores signals that a terminal
  or a service manager sends to all processes of a job.
- A probe of one server never waits for a probe of another server. An unexpected error ends no other server's probes.
- A server's connections are shut down when the server falls silent, and new connections while it stays silent.
- A pause of this process, which makes probes late, does not count as a server's silence.
"""

import argparse
import asyncio
import collections
import dataclasses
import enum
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from coordinator.heartbeat.open_connections import Endpoint, OpenConnections, peer_of, shut_down
from coordinator.heartbeat.probes import AsyncTaskProbe, Obstacle, find_obstacle
from coordinator.time_limit import time_limit


class Liveness(enum.Enum):
    """Whether a server answers, and if not, whether connections to it still look alive."""

    UNKNOWN = "unknown"
    ANSWERING = "answering"
    GONE = "gone"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class ServerState:
    """The state of one server.

    Attributes:
      liveness: ANSWERING; GONE if connections are refused or another program answers; SILENT if the server neither
        answers nor refuses, because it is frozen or its host is gone; UNKNOWN until the first probe has ended.
      incarnation: the number that the server drew at its start if it is ANSWERING, otherwise None.
      since: when the state began, in seconds on the clock of `time.monotonic`.
      obstacle: why the server does not answer, if it is GONE or SILENT.
      last_silence: when the server was last SILENT, on the same clock; older connections were shut down. Infinity while
        the server is SILENT; minus infinity if it was never SILENT. Only the client's `Heartbeat` sets it.
    """

    liveness: Liveness
    incarnation: int | None = None
    since: float = 0.0
    obstacle: Obstacle | None = None
    last_silence: float = -math.inf


# The pause after an unexpected error, in seconds.
_PAUSE = 5.0
# A probe that ends this many seconds after its deadline shows a pause of this process, not of the server.
_LONGEST_DELAY = 1.0


class WatchedServer:
    """Probes a server on an asyncio loop, and holds duplicates of the client's connections to the server.

    `interval` is the time between the starts of two probes; the server is silent when a probe has been unanswered for
    `timeout`. Both are in seconds. `report` is called with each new state, before connections are shut down.
    """

    def __init__(self, address: str, interval: float, timeout: float, report: Callable[[ServerState], None]) -> None:
        self._address = address
        self._interval = interval
        self._timeout = timeout
        self._report = report
        self._state = ServerState(Liveness.UNKNOWN)
        self._connections: dict[int, socket.socket] = {}
        self._is_closed = False
        self.peers: set[Endpoint] = set()

    @property
    def is_silent(self) -> bool:
        """Whether connections to the server are being shut down."""
        return self._state.liveness is Liveness.SILENT

    async def run(self) -> None:
        """Probes the server until the coroutine is cancelled. Prints unexpected errors, and then continues."""
        while True:
            try:
                await self._probe_again_and_again()
            except Exception:  # noqa: BLE001 - the next attempt may succeed, and other servers are watched all the same
                sys.stderr.write(
                    f"coordinator: the heartbeat of {self._address} met an unexpected error and goes on after "
                    f"{_PAUSE:g} s. This is a defect of coordinator; please report it.\n{traceback.format_exc()}"
                )
            await asyncio.sleep(_PAUSE)

    async def _probe_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        async with AsyncTaskProbe(self._address) as probe:
            while True:
                begun = loop.time()
                state = await self._probe_once(probe)
                known = self._state.liveness, self._state.incarnation
                if state is not None and (state.liveness, state.incarnation) != known:
                    if state.liveness is not Liveness.ANSWERING:
                        state = dataclasses.replace(state, obstacle=await find_obstacle(self._address))
                    self._set_state(state)
                # Code that waits for a connection or an answer may take a cancellation for its own end.
                if self._is_closed:
                    raise asyncio.CancelledError
                await asyncio.sleep(max(0.0, begun + self._interval - loop.time()))

    def hold(self, identity: int, connection: socket.socket) -> None:
        """Keeps a duplicate of a connection of the client."""
        self._connections[identity] = connection
        if (peer := peer_of(connection)) is not None:
            self.peers.add(peer)
        if self.is_silent:
            shut_down(connection)

    def release(self, identity: int) -> None:
        """Closes a duplicate of a connection that the client has closed; a connection ends with its last duplicate."""
        if (connection := self._connections.pop(identity, None)) is not None:
            connection.close()

    def close(self) -> None:
        """Closes all duplicates. The connections stay open in the client. No further probe begins."""
        self._is_closed = True
        for identity in list(self._connections):
            self.release(identity)

    async def _probe_once(self, probe: AsyncTaskProbe) -> ServerState | None:
        # The time of a loop is that of `time.monotonic`, except in tests.
        now = asyncio.get_running_loop().time
        begun = now()
        try:
            status = await probe.status(self._timeout)
        except TimeoutError:
            is_in_time = now() - begun < self._timeout + _LONGEST_DELAY
            return ServerState(Liveness.SILENT, None, now()) if is_in_time else None
        if status is None:
            return ServerState(Liveness.GONE, None, now())
        return ServerState(Liveness.ANSWERING, status.incarnation, now())

    def _set_state(self, state: ServerState) -> None:
        self._state = state
        self._report(state)
        if self.is_silent:
            for connection in self._connections.values():
                shut_down(connection)


# Much more than a client sends in one message.
MESSAGE_BYTES = 1 << 17
# The kernel passes at most 253 descriptors in one message.
MESSAGE_DESCRIPTORS = 64
# The time between searches for new connections to a silent server, in seconds.
_SILENT_INTERVAL = 0.1


class HeartbeatProcess:
    """Carries out the client's messages until the link, which is non-blocking, is closed.

    `client` is the client's process id. See `WatchedServer` for `interval` and `timeout`.
    """

    def __init__(self, link: socket.socket, client: int, interval: float, timeout: float) -> None:
        self._link = link
        self._client = client
        self._interval = interval
        self._timeout = timeout
        self._client_connections = OpenConnections(client)
        self._servers: dict[int, WatchedServer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: collections.deque[bytes] = collections.deque()
        # Set when a message has arrived, the state of a server has changed, or a task has ended.
        self._wakeup = asyncio.Event()

    async def run(self) -> None:
        """Runs until the client has left. An unexpected error here ends the process, not only one server's probes."""
        asyncio.get_running_loop().add_reader(self._link, self._wakeup.set)
        while os.getppid() == self._client:
            silent_peers = {peer for server in self._servers.values() if server.is_silent for peer in server.peers}
            if silent_peers:
                # The call includes connections that the client could not pass on.
                self._client_connections.shut_down_to(silent_peers)
            try:
                async with time_limit(_SILENT_INTERVAL if silent_peers else self._interval):
                    await self._wakeup.wait()
            except TimeoutError:
                continue
            self._wakeup.clear()
            for task in self._tasks.values():
                if task.done():
                    # Raises the error that has ended the task.
                    task.result()
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._link)
        for number in list(self._servers):
            self._forget(number)

    def _read(self) -> bool:
        """Reads and carries out one message; returns False if the client has left."""
        try:
            text, descriptors, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, MESSAGE_DESCRIPTORS)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if text:
            self._on_message(json.loads(text), [socket.socket(fileno=descriptor) for descriptor in descriptors])
        return bool(text)

    def _on_message(self, message: dict[str, Any], connections: list[socket.socket]) -> None:
        for number in message.get("forget", ()):
            self._forget(number)
        for number, address in message.get("watch", ()):
            self._watch(number, address)
        for identity, number in message.get("closed", ()):
            if number in self._servers:
                self._servers[number].release(identity)
        opened = message.get("opened", ())
        if len(connections) < len(opened):
            sys.stderr.write(
                "coordinator: the heartbeat has too many open files (ulimit -n); some calls to servers that freeze "
                "will not end.\n"
            )
        for (identity, number), connection in zip(opened, connections, strict=False):
            self._servers[number].hold(identity, connection)

    def _watch(self, number: int, address: str) -> None:
        server = WatchedServer(address, self._interval, self._timeout, lambda state: self._report(number, state))
        self._servers[number] = server
        self._tasks[number] = asyncio.create_task(server.run())
        self._tasks[number].add_done_callback(lambda _: self._wakeup.set())

    def _forget(self, number: int) -> None:
        server = self._servers.pop(number)
        self._tasks.pop(number).cancel()
        server.close()

    def _report(self, number: int, state: ServerState) -> None:
        message = {
            "number": number,
            "liveness": state.liveness.value,
            "incarnation": state.incarnation,
            "since": state.since,
            "obstacle": state.obstacle.name if state.obstacle else None,
        }
        self._wakeup.set()
        self._unsent.append(json.dumps(message).encode())
        self._send()

    def _send(self) -> None:
        """Sends what the link accepts. A blocked client reads the rest later, and does not block this process."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._link)
        while self._unsent:
            try:
                self._link.send(self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._link, self._send)
                return
            except ConnectionError:
                # The client has left, which the next `_read` notices.
                self._unsent.clear()
                return
            self._unsent.popleft()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="heartbeat_process", description=__doc__.partition("\n")[0])
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args(arguments)
    # Ctrl-C, a closed terminal, and the end of a service or job reach the client too, which may need this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The process needs a connection to every server, and duplicates of all connections of the client.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    link = socket.socket(fileno=options.link)
    link.setblocking(False)
    asyncio.run(HeartbeatProcess(link, options.client, options.interval, options.timeout).run())


if __name__ == "__main__":
    main(sys.argv[1:])
