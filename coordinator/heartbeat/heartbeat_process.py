"""The process beside a client that probes its servers, and shuts down its connections to those that fall silent.

    python -m coordinator.heartbeat.heartbeat_process --client ID --link DESCRIPTOR --interval SECONDS --timeout SECONDS

It is a separate process because all threads of the client may be blocked, with Python's global lock held, by the very
call that has to be ended. The link is a socket that preserves message boundaries. The client sends any of

    {"forget": [number, ...]}
    {"watch": [[number, address], ...]}
    {"closed": [[identity, number], ...]}
    {"opened": [[identity, number], ...]}       with a descriptor for each of these connections

and receives `{"number": ..., "liveness": ..., "incarnation": ..., "since": ...}` for every change.

While a server is silent, the client opens new connections to it, and may be blocked before it has passed them on. Where
the system lets one process duplicate descriptors of another (`OpenConnections`), these are fetched; where it does not,
such a call lasts until gRPC gives up connecting, after 20 seconds.

Promises: it ends when the client's end of the link is closed, or the client is gone, but on no signal that a terminal
or a service manager sends to all processes of a job.
"""

import argparse
import asyncio
import collections
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Set
from typing import Any

from coordinator.heartbeat.open_connections import Endpoint, OpenConnections, shut_down
from coordinator.heartbeat.watched_server import ServerState, WatchedServer

# Far more than a client sends in one message.
MESSAGE_BYTES = 1 << 17
# The kernel passes 253 descriptors in one message at most.
MESSAGE_DESCRIPTORS = 64
# From one search for new connections to a silent server to the next, in seconds.
_SILENT_INTERVAL = 0.1


class HeartbeatProcess:
    """Carries out the client's messages until the link is closed.

    Args:
      link: our end; non-blocking.
      client: the client's process id.
      interval: from one probe of a server to the next, in seconds.
      timeout: a server is silent when a probe has been unanswered for this long, in seconds.
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
        self._watches: asyncio.TaskGroup
        # Set when a message has arrived, or a server has changed.
        self._wakeup = asyncio.Event()

    async def run(self) -> None:
        """Runs until the client has left. An unexpected error ends all of it, rather than the probes of one server."""
        async with asyncio.TaskGroup() as self._watches:
            asyncio.get_running_loop().add_reader(self._link, self._wakeup.set)
            while os.getppid() == self._client:
                silent_peers = {peer for each in self._servers.values() if each.is_silent for peer in each.peers}
                self._shut_down_connections(silent_peers)
                try:
                    await asyncio.wait_for(self._wakeup.wait(), _SILENT_INTERVAL if silent_peers else self._interval)
                except TimeoutError:
                    continue
                self._wakeup.clear()
                if not self._read():
                    break
            asyncio.get_running_loop().remove_reader(self._link)
            for number in list(self._servers):
                self._forget(number)

    def _shut_down_connections(self, peers: Set[Endpoint]) -> None:
        """Shuts down the connections that the client could not pass on."""
        for found in self._client_connections.find(peers) if peers else ():
            if (connection := self._client_connections.duplicate(found)) is not None:
                with connection:
                    shut_down(connection)

    def _read(self) -> bool:
        """Reads and carries out one message. Returns False if the client has left."""
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
        self._tasks[number] = self._watches.create_task(server.run())

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
        """Sends what the link takes; a client that is blocked reads the rest later, and must not block this process."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._link)
        while self._unsent:
            try:
                self._link.send(self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._link, self._send)
                return
            except ConnectionError:
                # The client has left, which the next `_read` finds out.
                self._unsent.clear()
                return
            self._unsent.popleft()


def main(arguments: list[str]) -> None:
    """Runs the process to its end."""
    parser = argparse.ArgumentParser(prog="heartbeat_process", description=__doc__.partition("\n")[0])
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args(arguments)
    # Ctrl-C, a terminal that closes, and the end of a service or of a Slurm job reach the client too, which may still
    # need this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _raise_descriptor_limit()
    link = socket.socket(fileno=options.link)
    link.setblocking(False)
    asyncio.run(HeartbeatProcess(link, options.client, options.interval, options.timeout).run())


def _raise_descriptor_limit() -> None:
    """Makes room for a connection to every server and duplicates of all of the client's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
