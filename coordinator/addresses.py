"""Addresses of servers, `host:port`: the host is a name or an IP address; IPv6 stands in brackets, `[::1]:2222`."""

import errno
import re
import socket
from typing import NamedTuple

from coordinator.errors import LaunchError


class Address(NamedTuple):
    """A server's host, as sockets take it (an IPv6 address without its brackets), and its port, from 1 to 65535."""

    host: str
    port: int


def parse_address(text: object) -> Address:
    """Splits `host:port`; raises ValueError if the text is not of that form."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.strip("[]")
    is_text = not any("\ud800" <= character <= "\udfff" for character in host)
    if not (host and is_text and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise ValueError(f"An address must be 'host:port', got {text!r}.")
    return Address(host, int(port))


def in_address(host: str) -> str:
    """Returns a host as it is written before the port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class PageAddress(NamedTuple):
    """The host and port at which this machine serves a page (port 0: any free one), and the page's secret token.

    The token is part of the page's address. If it is empty, the server chooses a random one.
    """

    host: str
    port: int
    token: str = ""

    @property
    def url(self) -> str:
        """The page's address."""
        host = in_address(self.host)
        return f"http://{host}:{self.port}/{self.token}/"

    def __str__(self) -> str:
        return self.url.removeprefix("http://").removesuffix("/")


def parse_page_address(text: object, name: str) -> PageAddress:
    """Splits `host:port` or `host:port/token`; raises ValueError that names the setting for anything else."""
    form = r"(\[[^]/]+\]|[^:/\s]+):(\d{1,5})(?:/([\w.~-]+)/?)?"
    match = re.fullmatch(form, text, re.ASCII) if isinstance(text, str) else None
    if match is None or int(match[2]) > 65_535:
        raise ValueError(f"{name} must be 'host:port', such as '127.0.0.1:0', or 'host:port/token', got {text!r}.")
    return PageAddress(match[1].strip("[]"), int(match[2]), match[3] or "")


def check_port_is_free(task: str, address: str) -> None:
    """Raises LaunchError if a server cannot listen on this port; TensorFlow shares it, or fails without naming it."""
    port = parse_address(address).port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        # Allows a port whose last owner was killed a moment ago.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            advice = "Give the task a port from 1024 on."
            if error.errno == errno.EADDRINUSE:
                advice = f"End the process that listens there (`ss -ltnp sport = :{port}` shows it), or give the task "
                advice += "another port."
            raise LaunchError(f"{task} cannot serve on {address}: port {port}: {error.strerror}. {advice}") from None
