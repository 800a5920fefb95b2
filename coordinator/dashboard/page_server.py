"""The HTTP server of the dashboard.

    /TOKEN/             the page, and its files
    /TOKEN/api/state    the latest snapshot, as JSON
    /TOKEN/api/target   how many workers to have, as JSON
    /TOKEN/api/stream   snapshots as they come, as server-sent events
    /TOKEN/metrics      for Prometheus

Guarantees:
- Nothing that it answers changes anything, and it answers GET alone.
- Nothing is answered without the token, nor to a page of another site, whatever name that site gave this address.
- Each connection has a thread with a name, and an end: after `close`, or when its peer takes nothing for some seconds.
"""

import hmac
import http.server
import importlib.resources
import io
import ipaddress
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from http import HTTPStatus
from typing import Any

from coordinator.addresses import PageAddress
from coordinator.dashboard.metrics import CONTENT_TYPE, Metrics
from coordinator.dashboard.publisher import Publisher, state_of, target_of
from coordinator.errors import LaunchError

_logger = logging.getLogger("coordinator")

# How long a peer may take to send all of a request, or to take what is sent to it, in seconds.
_PEER_TIMEOUT = 10.0
# A stream without a new snapshot says in this interval, in seconds, that it is alive.
_ALIVE_INTERVAL = 5.0
# More connections at a time are refused: each has a thread.
_MOST_CONNECTIONS = 64
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class PageServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves the page, from when it is created until it is closed.

    Args:
      address: where to listen; port 0 is any free one; without a token, a random one is chosen.
      publisher: has the snapshots.

    Attributes:
      url: of the page, with the token.

    Raises:
      LaunchError: it cannot listen there.
    """

    def __init__(self, address: PageAddress, publisher: Publisher) -> None:
        self.token = address.token or secrets.token_urlsafe(16)
        self.publisher = publisher
        self.metrics = Metrics(publisher.watch)
        self.host = address.host
        self.files = _page_files()
        self._open: dict[threading.Thread, socket.socket] = {}
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((address.host, address.port), _Request)
        except OSError as error:
            raise LaunchError(
                f"The dashboard cannot listen at {address.host}, port {address.port}: {error.strerror or error}. Give "
                "another address, or port 0 for any free one."
            ) from error
        self.is_loopback = ipaddress.ip_address(str(self.server_address[0])).is_loopback
        self.url = PageAddress(address.host, self.server_address[1], self.token).url
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="coordinator-dashboard-accept", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Ends all connections and threads; the publisher must be closed, so that streams say goodbye.

        Args:
          timeout: how long to wait for threads, in seconds.
        """
        deadline = time.monotonic() + timeout
        self.shutdown()
        self._thread.join()
        self.server_close()
        for thread, connection in list(self._open.items()):
            thread.join(max(0.0, min(1.0, deadline - time.monotonic())))
            _shut(connection)
            thread.join(max(0.0, deadline - time.monotonic()))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection on a separate thread."""
        if len(self._open) >= _MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._answer, args=(request, client_address), name="coordinator-dashboard-request", daemon=True
        )
        self._open[thread] = request
        thread.start()

    def server_bind(self) -> None:
        """Listens; unlike that of the base, asks no name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base gives them
        """Logs an answer that failed; not that its peer has gone."""
        if not isinstance(sys.exception(), OSError):
            _logger.error("The dashboard could not answer a request.", exc_info=sys.exception())

    def is_own_host(self, host: str | None) -> bool:
        """Returns whether a request's `Host` names this machine, and not a site that resolves to its address."""
        try:
            name = urllib.parse.urlsplit(f"//{host or ''}").hostname
        except ValueError:
            return False
        if name in ("localhost", self.host):
            return True
        try:
            address = ipaddress.ip_address(name or "")
        except ValueError:
            return not self.is_loopback and name == socket.gethostname().lower()
        return address.is_loopback or not self.is_loopback

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            del self._open[threading.current_thread()]


class _Request(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    server_version, sys_version = "coordinator", ""
    timeout = _PEER_TIMEOUT

    def setup(self) -> None:
        """Has all of the request come within the time of a peer."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_RequestReader(self.connection))

    def do_GET(self) -> None:
        """Answers, or refuses to."""
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not self.server.is_own_host(self.headers.get("Host")):
            self._send_text(HTTPStatus.FORBIDDEN, "The dashboard is not known by this host name. Use its address.\n")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            text = "Open the dashboard by its whole address, with its token: `strategy.dashboard_url` has it.\n"
            self._send_text(HTTPStatus.FORBIDDEN, text)
        elif not slash:
            self.send_response(HTTPStatus.MOVED_PERMANENTLY)
            self.send_header("Location", f"/{self.server.token}/")
            self.end_headers()
        else:
            self._answer(path)

    def _answer(self, path: str) -> None:
        publisher = self.server.publisher
        match path:
            case "api/stream":
                self._stream()
            case "api/state":
                self._send(HTTPStatus.OK, "application/json", state_of(publisher.watch()).encode())
            case "api/target":
                self._send(HTTPStatus.OK, "application/json", target_of(publisher.watch()).encode())
            case "metrics":
                self._send(HTTPStatus.OK, CONTENT_TYPE, self.server.metrics.text().encode())
            case _ if file := self.server.files.get(path or "index.html"):
                self._send(HTTPStatus.OK, _TYPES[(path or "index.html").rpartition(".")[2]], file)
            case _:
                self._send_text(HTTPStatus.NOT_FOUND, "The dashboard has no such page.\n")

    def _stream(self) -> None:
        self._send_head(HTTPStatus.OK, "text/event-stream")
        for message in self.server.publisher.messages(_ALIVE_INTERVAL):
            self.wfile.write(message.encode())

    def _send_text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self._send_head(status, content_type, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, content_type: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": content_type, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base gives it
        """Logs nothing: the token is part of each request."""


class _RequestReader(io.RawIOBase):
    """Reads a connection until a deadline: its own timeout would be that of each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + _PEER_TIMEOUT

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receives something; raises TimeoutError after the deadline."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_PEER_TIMEOUT)


def _page_files() -> dict[str, bytes]:
    folder = importlib.resources.files("coordinator.dashboard") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It has ended already.
        return
