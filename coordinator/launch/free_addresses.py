"""Loopback addresses for servers that are about to start.

Nothing keeps a port until its server has it: a server whose port was taken meanwhile refuses to start, and says so.
"""

import secrets
from collections.abc import Collection

import portpicker

from coordinator.errors import LaunchError

# Below the ports that the kernel hands to outgoing connections. A client that tries again and again to reach a dead
# server on one of those is, sooner or later, given that very port, connects to itself, and keeps the server out.
_PORTS = range(10_000, 32_768)
_MOST_TRIALS = 10_000


def free_addresses(count: int, *, besides: Collection[str] = ()) -> list[str]:
    """Returns different `127.0.0.1:port` addresses that nothing listens on.

    Args:
      count: how many.
      besides: addresses not to return, such as those of servers that are down at present.

    Raises:
      LaunchError: there are not that many.
    """
    found: list[str] = []
    for _ in range(_MOST_TRIALS):
        if len(found) == count:
            return found
        # Not `random`: two programs that seed it alike would draw the same ports.
        port = secrets.choice(_PORTS)
        address = f"127.0.0.1:{port}"
        if address not in found and address not in besides and portpicker.is_port_free(port):
            found.append(address)
    raise LaunchError(f"There are no {count} free ports between {_PORTS.start} and {_PORTS.stop}: end some servers.")
