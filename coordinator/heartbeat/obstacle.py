"""Why a server does not answer, as far as a plain connection to its address shows.

It promises to wait for a limited time, except that `find_obstacles` waits for the resolution of host names to end.
"""

import asyncio
import concurrent.futures
import enum
import socket
from collections.abc import Collection, Sequence
from typing import Any

from coordinator.addresses import parse_address

# In seconds. A host that is up accepts or refuses a connection in a fraction of that.
_RESOLVE_TIMEOUT = 2.0
_CONNECT_TIMEOUT = 1.0


class Obstacle(enum.Enum):
    """What a plain connection shows, in words for users."""

    REFUSED = "the connection is refused, so no server runs there"
    UNRESOLVED = "the host name does not resolve; correct it, or wait until the DNS has it"
    UNREACHED = "no connection is made: the host is down, or a firewall drops the packets"
    SILENT = "it accepts connections but does not answer: it is frozen or overloaded, or is no TensorFlow server"


def find_obstacles(addresses: Collection[str]) -> dict[str, Obstacle]:
    """Connects to servers that do not answer, all at once.

    Args:
      addresses: `host:port` of each.

    Returns:
      The obstacle of each.
    """

    async def find_all() -> list[Obstacle]:
        return await asyncio.gather(*map(find_obstacle, addresses))

    # On another thread, since the caller's may run an event loop already, as in a notebook.
    with concurrent.futures.ThreadPoolExecutor(1, "coordinator-obstacles") as thread:
        return dict(zip(addresses, thread.submit(asyncio.run, find_all()).result(), strict=True))


async def find_obstacle(address: str) -> Obstacle:
    """Connects to a server that does not answer; returns what that shows."""
    loop = asyncio.get_running_loop()
    try:
        endpoints = await _endpoints(*parse_address(address))
    except (OSError, UnicodeError):  # a time-out too, and a name that no host can have
        return Obstacle.UNRESOLVED
    obstacle = Obstacle.UNREACHED
    for family, kind, protocol, _, endpoint in endpoints:
        try:
            # Fails for an IPv6 address where the kernel has no IPv6.
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                await asyncio.wait_for(loop.sock_connect(connection, endpoint), _CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            obstacle = Obstacle.REFUSED
        except OSError:  # a time-out too
            continue
        else:
            return Obstacle.SILENT
    return obstacle


async def _endpoints(host: str, port: int) -> Sequence[Any]:
    """Returns what `socket.getaddrinfo` does.

    Raises:
      OSError: the name does not resolve, or not in time.
    """
    try:
        # An IP address needs no thread. Those of the event loop are few, and names that hang may occupy them all.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        resolution = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return await asyncio.wait_for(resolution, _RESOLVE_TIMEOUT)
