"""At which addresses of this machine a port can be reached."""

import contextlib
import ipaddress
import socket

import psutil

DEADLINE = 60.0
# How long a connection is tried that the kernel should drop, in seconds: long enough for one that it does not.
MOMENT = 0.5


def answers(host: str, port: int, timeout: float = DEADLINE) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout):
        return True
    return False


def own_addresses() -> list[str]:
    """The addresses of this machine at which others reach it; at least one, or tests of these would show nothing."""
    addresses = [each.address for found in psutil.net_if_addrs().values() for each in found]
    reached = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            ip = ipaddress.ip_address(address)
            if not ip.is_loopback and not ip.is_link_local:
                reached.append(address)
    assert reached, "This machine has no address but those of its loopback interface."
    return reached


def own_ipv4_address() -> str:
    """One of them that an address `host:port` may have."""
    return next(address for address in own_addresses() if ":" not in address)
