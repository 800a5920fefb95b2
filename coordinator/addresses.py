"""Parses what users name: server addresses `host:port` (IPv6 in brackets, `[::1]:2222`), and file paths.

Paths are local paths, or URLs such as `gs://bucket/run`, which only TensorFlow reads.

Code without TensorFlow, and code that changes a file in place, accept only local paths and raise an error for a URL.
Without the error, Python would create a folder named `gs:` in the working directory.
"""

import errno
import os
import re
import socket
from typing import NamedTuple

from coordinator.errors import LaunchError


class Address(NamedTuple):
    """A server's host, as sockets take it (an IPv6 address without brackets), and the port, from 1 to 65535."""

    host: str
    port: int


def parse_address(text: object) -> Address:
    """Splits `host:port`; raises ValueError if the text has another form."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.strip("[]")
    is_text = not any("\ud800" <= character <= "\udfff" for character in host)
    if not (host and is_text and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise ValueError(f"An address must be 'host:port', got {text!r}.")
    return Address(host, int(port))


def in_address(host: str) -> str:
    """Returns a host as an address contains it: an IPv6 address in brackets, any other host unchanged."""
    return f"[{host}]" if ":" in host else host


class PageAddress(NamedTuple):
    """The host and port at which this machine serves a page (port 0 for any free port), and the page's secret token.

    The token is part of the page's address. If the token is empty, the server chooses a random token.
    """

    host: str
    port: int
    token: str = ""

    @property
    def url(self) -> str:
        host = in_address(self.host)
        return f"http://{host}:{self.port}/{self.token}/"

    def __str__(self) -> str:
        return self.url.removeprefix("http://").removesuffix("/")


def parse_page_address(text: object, name: str) -> PageAddress:
    """Splits `host:port` or `host:port/token`; raises a ValueError that names the setting if the text is neither."""
    form = r"(\[[^]/]+\]|[^:/\s]+):(\d{1,5})(?:/([\w.~-]+)/?)?"
    match = re.fullmatch(form, text, re.ASCII) if isinstance(text, str) else None
    if match is None or int(match[2]) > 65_535:
        raise ValueError(f"{name} must be 'host:port', such as '127.0.0.1:0', or 'host:port/token', got {text!r}.")
    return PageAddress(match[1].strip("[]"), int(match[2]), match[3] or "")


def check_port_is_free(task: str, address: str) -> None:
    """Raises LaunchError if a server cannot listen on this port. TensorFlow would share it or fail without its name."""
    port = parse_address(address).port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        # SO_REUSEADDR allows a port whose former owner was just killed.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            advice = "Give the task a port from 1024 on."
            if error.errno == errno.EADDRINUSE:
                advice = f"End the process that listens there (`ss -ltnp sport = :{port}` shows it), or give the task "
                advice += "another port."
            raise LaunchError(f"{task} cannot serve on {address}: port {port}: {error.strerror}. {advice}") from None


_URL = re.compile(r"[a-zA-Z][\w+.-]+://")
# The form into which `pathlib` changes a URL.
_BROKEN_URL = re.compile(r"([a-zA-Z][\w+.-]+):/(?!/)")


def is_url(path: str) -> bool:
    """Returns whether a path, as `path_text` returns it, is a URL."""
    return _URL.match(path) is not None


def path_text(path: str | os.PathLike[str]) -> str:
    """Returns a path as a str, `file:///there` as `/there`. Raises ValueError if `pathlib` has changed a URL."""
    text = os.fspath(path)
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    if broken := _BROKEN_URL.match(text):
        url = f"{broken[1]}://{text[broken.end() :]}"
        raise ValueError(f"{text!r} looks like the URL {url!r} after pathlib has changed it. Give a URL as a str.")
    return text


def local_path(path: str | os.PathLike[str], purpose: str) -> str:
    """Returns a user's local path as a str. Raises ValueError for a URL; `purpose` names the path in the message."""
    text = path_text(path)
    if is_url(text):
        raise ValueError(f"{purpose} must be on a local file system, got {text!r}. Copy it from or to there.")
    return text


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Returns a path of checkpoint files as a str. Raises ValueError if TensorFlow could not find files there."""
    text = path_text(path)
    if set(text) & set("*?[\\"):
        raise ValueError(
            f"TensorFlow does not find the files of a checkpoint in {text!r}: it takes a path with *, ?, [ or \\ for a "
            "pattern. Give another path."
        )
    return text
