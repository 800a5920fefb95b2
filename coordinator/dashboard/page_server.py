"""The HTTP server of the dashboard.

    /TOKEN/             the page, and its files
    /TOKEN/api/state    the latest snapshot, as JSON
    /TOKEN/api/target   how many workers to have, as JSON
    /TOKEN/api/stream   snapshots as they come, as server-sent events
    /TOKEN/metrics      for Prometheus

Guarantees:
- Nothing that it answers changes anything, and it answers GET alone.
- Nothing is answered without the token, nor to a page of another site, whatever name that site gave this address.
- Connections have an end: after `close`, or when the peer sends no request, or takes nothing, for some seconds. Those
  that do not show the token, however many, keep nobody out (`http_server.py`); the oldest of 33 streams ends.
"""

import hmac
import importlib.resources
import secrets
from http import HTTPStatus

from coordinator.addresses import PageAddress
from coordinator.dashboard.metrics import CONTENT_TYPE, Metrics
from coordinator.dashboard.publisher import Publisher, state_of, target_of
from coordinator.errors import LaunchError
from coordinator.http_server import HttpServer, Request

# A stream without a new snapshot says in this interval, in seconds, that it is alive.
_ALIVE_INTERVAL = 5.0
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


class PageServer:
    """Serves the page, from when it is created until it is closed.

    Args:
      address: where to listen; port 0 is any free one; without a token, a random one is chosen.
      publisher: has the snapshots.

    Attributes:
      token: is part of the page's address.
      url: of the page, with the token.
      host: at which it listens.
      server_port: on which it listens.
      is_loopback: it can be reached from this machine alone.
      files: of the page, by name.

    Raises:
      LaunchError: it cannot listen there.
    """

    def __init__(self, address: PageAddress, publisher: Publisher) -> None:
        self.token = address.token or secrets.token_urlsafe(16)
        self.host = address.host
        self.files = _page_files()
        self._publisher = publisher
        self._metrics = Metrics(publisher.watch)
        try:
            self._server = HttpServer(
                address.host, address.port, self._answer, name="coordinator-dashboard", names=[address.host]
            )
        except OSError as error:
            raise LaunchError(
                f"The dashboard cannot listen at {address.host}, port {address.port}: {error.strerror or error}. Give "
                "another address, or port 0 for any free one."
            ) from error
        self.is_loopback, self.server_port = self._server.is_loopback, self._server.port
        self.url = PageAddress(address.host, self.server_port, self.token).url

    def close(self, timeout: float) -> None:
        """Ends all connections and threads; the publisher must be closed, so that streams say goodbye.

        Args:
          timeout: how long to wait for threads, in seconds.
        """
        self._server.close(timeout)

    def _answer(self, request: Request) -> None:
        token, slash, path = request.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            text = "Open the dashboard by its whole address, with its token: `strategy.dashboard_url` has it.\n"
            _send(request, HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", text.encode())
        elif not slash:
            request.send(HTTPStatus.MOVED_PERMANENTLY, _TYPES["html"], b"", {"Location": f"/{self.token}/"})
        else:
            self._answer_owner(request, path)

    def _answer_owner(self, request: Request, path: str) -> None:
        match path:
            case "api/stream":
                request.begin_stream("text/event-stream", _HEADERS)
                for message in self._publisher.messages(_ALIVE_INTERVAL):
                    request.wfile.write(message.encode())
            case "api/state":
                _send(request, HTTPStatus.OK, "application/json", state_of(self._publisher.watch()).encode())
            case "api/target":
                _send(request, HTTPStatus.OK, "application/json", target_of(self._publisher.watch()).encode())
            case "metrics":
                _send(request, HTTPStatus.OK, CONTENT_TYPE, self._metrics.text().encode())
            case _ if file := self.files.get(path or "index.html"):
                _send(request, HTTPStatus.OK, _TYPES[(path or "index.html").rpartition(".")[2]], file)
            case _:
                text = b"The dashboard has no such page.\n"
                _send(request, HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", text)


def _send(request: Request, status: HTTPStatus, content_type: str, body: bytes) -> None:
    request.send(status, content_type, body, _HEADERS)


def _page_files() -> dict[str, bytes]:
    folder = importlib.resources.files("coordinator.dashboard") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
