"""How processes on several machines find each other, without a fixed port and without a shared folder.

    first     listens on the first free port of a sequence that follows from the group's name
    others    try the ports of the same sequence on the first one's host, until one answers in the group's name

The connections stay open, and carry JSON objects. The end of one is the end of the process at its other end, however
that ended. Promises: whatever else listens on one of the ports, or connects to one, is left alone; every wait has a
deadline; the port is closed when all have connected.
"""

import contextlib
import ipaddress
import json
import random
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

from coordinator.errors import LaunchError
from coordinator.launch.local_servers import PORTS

_TRIED_PORTS = 32
# How long the other end of a connection may take to say who it is, in seconds.
_HANDSHAKE_TIMEOUT = 3.0
_PAUSE = 0.2
_LONGEST_MESSAGE = 1_000_000


class Link:
    """A connection to another process of the group. One thread may send, and one receive.

    Args:
      connection: an established connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    @property
    def host(self) -> str:
        """The IP address of this machine at which the other end reaches it."""
        address = ipaddress.ip_address(self._connection.getsockname()[0])
        return str(getattr(address, "ipv4_mapped", None) or address)

    def send(self, **message: Any) -> None:
        """Sends an object. Does nothing if the other process has ended."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next object; None if the other process has ended, or sends something else.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Raises:
          TimeoutError: none came in time. The link is of no use then.
        """
        self._connection.settimeout(timeout)
        try:
            message = json.loads(self._lines.readline(_LONGEST_MESSAGE) or b"null")
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the connection; a thread that receives gets None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


def accept(group: str, ranks: Collection[int], *, is_local: bool, timeout: float) -> dict[int, Link]:
    """Waits for other processes, as the first one.

    Args:
      group: its name.
      ranks: the numbers of the others.
      is_local: all of them run on this machine.
      timeout: in seconds.

    Returns:
      The link to each.

    Raises:
      LaunchError: the message says which did not connect.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout
    with _listening(group, "127.0.0.1" if is_local else "") as listener:
        while missing := set(ranks) - set(links):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                link = Link(listener.accept()[0])
            except TimeoutError:
                for each in links.values():
                    each.close()
                names = ", ".join(map(str, sorted(missing)))
                raise LaunchError(f"The tasks {names} did not start within {timeout:g} s.") from None
            hello = _greeting(link)
            if hello.get("group") == group and hello.get("rank") in missing:
                link.send(group=group)
                links[hello["rank"]] = link
            else:
                link.close()
    return links


def connect(group: str, rank: int, host: str, timeout: float) -> Link:
    """Connects to the first process.

    Args:
      group: its name.
      rank: the number of this process.
      host: where the first process runs.
      timeout: in seconds.

    Raises:
      LaunchError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while time.monotonic() < deadline:
        for port in _ports(group):
            # It may be in use by another program there, which may say anything or nothing.
            try:
                link = Link(socket.create_connection((host, port), _HANDSHAKE_TIMEOUT))
            except OSError:
                continue
            link.send(group=group, rank=rank)
            if _greeting(link).get("group") == group:
                return link
            link.close()
        pause.wait(_PAUSE)
    raise LaunchError(f"The first task, on {host}, did not answer within {timeout:g} s. Is the host reachable?")


def _greeting(link: Link) -> dict[str, Any]:
    """Returns the first object from the other end; an empty one if that is no process of such a group."""
    try:
        return link.receive(_HANDSHAKE_TIMEOUT) or {}
    except TimeoutError:
        return {}


def _ports(group: str) -> list[int]:
    return random.Random(group).sample(PORTS, _TRIED_PORTS)


def _listening(group: str, host: str) -> socket.socket:
    for port in _ports(group):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), backlog=1024)
    raise LaunchError(f"None of {_TRIED_PORTS} ports between {PORTS.start} and {PORTS.stop} is free on this host.")
