"""The TCP connections of a process to given servers, whoever opened them: also those inside a C++ library.

They are found among the process's file descriptors, by their other end. It promises to

- close, and disturb, nothing that is not its own: each descriptor is looked at through a duplicate;
- see connections that are still being made;
- never fail because a connection was closed meanwhile.
"""

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Collection

from coordinator.heartbeat.endpoint import Endpoint
from coordinator.heartbeat.endpoint_lookup import EndpointLookup
from coordinator.heartbeat.process_descriptors import ProcessDescriptors

# Where Linux lists where connections lead that are still being made; `getpeername` does not say.
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_SYN_SENT = 2


@dataclasses.dataclass(frozen=True)
class OpenConnection:
    """One connection.

    Attributes:
      identity: a number that no other open socket of this machine has; it survives duplication.
      descriptor: the file descriptor that it had in its process when it was found.
      peer: where it leads.
    """

    identity: int
    descriptor: int
    peer: Endpoint


class OpenConnections:
    """Finds the connections of a process. One thread at a time may use it.

    Args:
      process: the id of the process, which this one must be allowed to trace; None for this one.
    """

    def __init__(self, process: int | None = None) -> None:
        self._descriptors = ProcessDescriptors(process)
        # The other ends of the sockets seen last, by identity: a connection never changes where it leads.
        self._peers: dict[int, Endpoint] = {}

    def find(self, peers: Collection[Endpoint]) -> list[OpenConnection]:
        """Returns the connections that are open, or being made, to any of some endpoints."""
        found = []
        for identity, descriptor in self._descriptors.sockets():
            peer = self._peers.get(identity) or self._peer(identity, descriptor)
            if peer is not None:
                found.append(OpenConnection(identity, descriptor, peer))
        self._peers = {each.identity: each.peer for each in found}
        return [each for each in found if each.peer in peers]

    def duplicate(self, connection: OpenConnection) -> socket.socket | None:
        """Returns another handle to a connection, which the caller closes; None if it was closed meanwhile."""
        return self._descriptors.duplicate(connection.identity, connection.descriptor)

    def shut_down(self, address: str) -> int:
        """Ends all connections to a server: calls to it fail, as if it had been killed.

        Args:
          address: its `host:port`. The name of a host is looked up, which may take as long as the network makes it.

        Returns:
          How many there were.
        """
        found = self.find(EndpointLookup().owners([address]))
        for each in found:
            if (connection := self.duplicate(each)) is not None:
                with connection:
                    hang_up(connection)
        return len(found)

    def _peer(self, identity: int, descriptor: int) -> Endpoint | None:
        duplicate = self._descriptors.duplicate(identity, descriptor)
        if duplicate is None:
            return None
        with duplicate:
            return peer_of(duplicate)


def hang_up(connection: socket.socket) -> None:
    """Ends a connection in whichever process it is open; one that was never made, or has ended, has no need of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def peer_of(connection: socket.socket) -> Endpoint | None:
    """Where a TCP connection leads, also while it is being made; None if it leads nowhere, or is none."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return _awaited_peer(connection)
    return Endpoint.of(host, port)


def _awaited_peer(connection: socket.socket) -> Endpoint | None:
    """Where a connection leads that is still being made, by the kernel's own table."""
    if sys.platform != "linux" or connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _SYN_SENT:
        return None
    identity = str(os.fstat(connection.fileno()).st_ino)
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if len(fields) > 9 and fields[9] == identity:
                    return _endpoint(fields[2])
    return None


def _endpoint(entry: str) -> Endpoint:
    """Reads `0100007F:1F90`: the words of the IP address, as numbers of this machine, and the port."""
    host, _, port = entry.partition(":")
    words = (int(host[start : start + 8], 16) for start in range(0, len(host), 8))
    return Endpoint.of(b"".join(word.to_bytes(4, sys.byteorder) for word in words), int(port, 16))
