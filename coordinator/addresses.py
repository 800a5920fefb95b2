"""Addresses of servers, `host:port`: the host is a name or an IP address; IPv6 stands in brackets, `[::1]:2222`."""

import errno
import socket
from typing import NamedTuple

from coordinator.errors import LaunchError


class Address(NamedTuple):
    """The parts of a server's address.

    Attributes:
      host: as sockets take it: an IPv6 address without its brackets.
      port: from 1 to 65535.
    """

    host: str
    port: int


def parse_address(text: object) -> Address:
    """Splits `host:port`.

    Raises:
      ValueError: the text is not of that form.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.strip("[]")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError(f"An address must be 'host:port', got {text!r}.")
    return Address(host, int(port))


def check_port_is_free(task: str, address: str) -> None:
    """Checks that a server on this machine can listen on the port of its address.

    TensorFlow would share the port with another server, or say "Could not start gRPC server" without naming it.

    Args:
      task: the server's name, for the message.
      address: its `host:port`.

    Raises:
      LaunchError: the port is in use, or needs rights that this process does not have.
    """
    port = parse_address(address).port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        # A port whose last owner was killed a moment ago may be used again.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            advice = "Give the task a port from 1024 on."
            if error.errno == errno.EADDRINUSE:
                advice = f"End the process that listens there (`ss -ltnp sport = :{port}` shows it), or give the task "
                advice += "another port."
            raise LaunchError(f"{task} cannot serve on {address}: port {port}: {error.strerror}. {advice}") from None
