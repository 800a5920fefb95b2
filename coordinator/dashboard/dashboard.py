"""The dashboard of a strategy: a page that shows what happens while training runs.

    coordinator-dashboard            twice a second: counts and events -> `Aggregator` -> snapshot -> `Publisher`
    coordinator-dashboard-servers    while there are readers: asks the parameter servers and the update rules
    coordinator-dashboard-accept     takes connections (`PageServer`)
    coordinator-dashboard-request    one for each request that is answered

    /TOKEN/             the page, and its files
    /TOKEN/api/state    the latest snapshot, as JSON
    /TOKEN/api/target   how many workers to have, as JSON
    /TOKEN/api/stream   snapshots as they come, as server-sent events
    /TOKEN/metrics      for Prometheus

Guarantees:
- Training does not wait for the dashboard. `close` ends the dashboard's threads, and waits at most 5 s for a server.
- Only GET is answered, and no request changes anything.
- A request is refused if it lacks the token, or names another host than this machine, as from another site's page.
- A connection ends after `close`, or when its peer has sent no request, or read no data, for some seconds. Any number
  of peers without the token cannot exclude a reader (`http_server.py`). A 33rd stream ends the oldest stream.
"""

import contextlib
import hmac
import importlib.resources
import json
import logging
import math
import pathlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus

from coordinator.addresses import PageAddress
from coordinator.background_thread import BackgroundThread
from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.dashboard.aggregator import Aggregator
from coordinator.dashboard.metrics import CONTENT_TYPE, Metrics
from coordinator.dashboard.snapshot import RuleRow, ServerUsage, Snapshot
from coordinator.errors import LaunchError
from coordinator.events.event_stream import EventStream
from coordinator.http_server import HttpServer, Request
from coordinator.statistics import ClusterStatistics

_logger = logging.getLogger("coordinator")

# How long a reader counts as present after a request, in seconds. Prometheus asks every 15 s or every minute.
_WATCH_TIME = 75.0
# The time between two snapshots, in seconds, with and without a reader.
_INTERVAL, _INTERVAL_UNWATCHED = 0.5, 1.0
# The time between two polls of the servers, in seconds.
_POLL_INTERVAL = 2.0
# After how many seconds without a new snapshot a stream sends an empty message.
_ALIVE_INTERVAL = 5.0
# How long `close` waits for a connection or a server that does not answer, in seconds.
_CLOSE_TIMEOUT = 5.0

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
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"


class Publisher:
    """Holds the latest snapshot, which is `first` at the beginning."""

    def __init__(self, first: Snapshot, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._snapshot = first
        self._number = 0
        # The message with the latest snapshot, without the segments that had ended before the previous snapshot.
        self._increment = ""
        self._streams = 0
        self._asked_at = -math.inf
        self._is_closed = False

    @property
    def is_watched(self) -> bool:
        """Whether a stream is open, or a snapshot was read in the last 75 s."""
        return self._streams > 0 or self._clock.now() < self._asked_at + _WATCH_TIME

    def publish(self, snapshot: Snapshot) -> None:
        increment = _message(state_of(snapshot, self._snapshot.time)) if self._streams else ""
        with self._changed:
            self._snapshot, self._increment = snapshot, increment
            self._number += 1
            self._changed.notify_all()

    def watch(self) -> Snapshot:
        self._asked_at = self._clock.now()
        return self._snapshot

    def messages(self, interval: float) -> Iterator[str]:
        """Yields server-sent events until `close`: the whole latest snapshot, then the news of each further snapshot.

        After `interval` seconds without a new snapshot, `messages` yields an empty message.
        """
        with self._changed:
            self._streams += 1
            number, snapshot = self._number, self._snapshot
        try:
            yield _message(state_of(snapshot))
            while not self._is_closed:
                with self._changed:
                    if self._number == number and not self._is_closed:
                        self._changed.wait(interval)
                    missed = self._number - number
                    number, snapshot, increment = self._number, self._snapshot, self._increment
                if missed == 1 and increment:
                    yield increment
                elif missed:
                    yield _message(state_of(snapshot))
                elif not self._is_closed:
                    yield ":\n\n"
            yield "event: end\ndata: \n\n"
        finally:
            with self._changed:
                self._streams -= 1

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def state_of(snapshot: Snapshot, since: float = 0.0) -> str:
    """Returns a snapshot as JSON, with the names of its attributes. The advice is written as one sentence.

    A segment of the stream is a list of its values. Segments that ended before `since` are left out.
    """
    segments = [vars(segment).values() for segment in snapshot.stream if segment.end >= since]
    stream = [[round(value, 3) if isinstance(value, float) else value for value in segment] for segment in segments]
    fields = {**vars(snapshot), "stream": stream, "advice": snapshot.advice.text if snapshot.advice else ""}
    return json.dumps(fields, default=vars, separators=(",", ":"), allow_nan=False)


def target_of(snapshot: Snapshot) -> str:
    """Returns the recommended number of workers as JSON: a `ScaleAdvice`, or `null` before enough was measured."""
    return json.dumps(snapshot.advice, default=vars, allow_nan=False)


def _message(state: str) -> str:
    return f"data: {state}\n\n"


class PageServer:
    """Serves the page from the server's creation until `close`. Raises LaunchError if it cannot listen.

    Port 0 of `address` means any free port; without a token, a random token is chosen. `url` is the page's address,
    with the token. `is_loopback` is True if only this machine can reach the page.
    """

    def __init__(self, address: PageAddress, publisher: Publisher) -> None:
        self.token = address.token or secrets.token_urlsafe(16)
        self.host = address.host
        page = importlib.resources.files("coordinator.dashboard") / "page"
        files = {file.name: file for file in page.iterdir() if file.name.rpartition(".")[2] in _TYPES}
        self.files = {name: file.read_bytes() for name, file in files.items()}
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
        """Ends all connections and threads in `timeout` seconds. Close the publisher first, to end streams."""
        self._server.close(timeout)

    def _answer(self, request: Request) -> None:
        token, slash, path = request.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            text = b"Open the dashboard by its whole address, with its token: `strategy.dashboard_url` has it.\n"
            request.send(HTTPStatus.FORBIDDEN, _TEXT, text, _HEADERS)
        elif not slash:
            request.send(HTTPStatus.MOVED_PERMANENTLY, _TYPES["html"], b"", {"Location": f"/{self.token}/"})
        elif path == "api/stream":
            request.begin_stream("text/event-stream", _HEADERS)
            for message in self._publisher.messages(_ALIVE_INTERVAL):
                request.wfile.write(message.encode())
        else:
            request.send(*self._answer_to_owner(path), _HEADERS)

    def _answer_to_owner(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        match path or "index.html":
            case "api/state":
                return HTTPStatus.OK, _JSON, state_of(self._publisher.watch()).encode()
            case "api/target":
                return HTTPStatus.OK, _JSON, target_of(self._publisher.watch()).encode()
            case "metrics":
                return HTTPStatus.OK, CONTENT_TYPE, self._metrics.text().encode()
            case name if name in self.files:
                return HTTPStatus.OK, _TYPES[name.rpartition(".")[2]], self.files[name]
        return HTTPStatus.NOT_FOUND, _TEXT, b"The dashboard has no such page.\n"


class Dashboard:
    """Serves a page about a strategy until it is closed. Raises LaunchError if it cannot listen.

    No argument may keep the strategy alive. `statistics` must return immediately. `usage`, which asks the parameter
    servers, and `rules`, which reads the counters of the update rules, may take seconds.
    """

    def __init__(
        self,
        address: PageAddress,
        statistics: Callable[[], ClusterStatistics],
        events: EventStream,
        usage: Callable[[], Sequence[ServerUsage]],
        rules: Callable[[], Sequence[RuleRow]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._statistics, self._events = statistics, events
        self._read_usage, self._read_rules = usage, rules
        program = pathlib.PurePath(sys.argv[0]).name if sys.argv else ""
        self._aggregator = Aggregator(time.time(), program)
        self._usage: Sequence[ServerUsage] = ()
        self._rules: Sequence[RuleRow] = ()
        self._next_event = 0
        self._publisher = Publisher(self._aggregator.snapshot(time.time(), statistics()), self._clock)
        self._server = PageServer(address, self._publisher)
        self.url = self._server.url
        self._publishing = BackgroundThread("coordinator-dashboard", self._publish)
        self._polling = BackgroundThread("coordinator-dashboard-servers", self._poll_servers)
        self._publishing.start()
        self._polling.start()
        if not self._server.is_loopback:
            _logger.warning(
                "The dashboard listens at %s and can be reached from other machines, unencrypted, by those who have "
                "its token.",
                self._server.host,
            )

    def close(self) -> None:
        self._publishing.stop()
        self._polling.stop()
        self._publishing.wait_stopped()
        try:
            self._publish_once()
        finally:
            self._publisher.close()
            self._server.close(_CLOSE_TIMEOUT)
            self._polling.wait_stopped(_CLOSE_TIMEOUT)

    def _publish(self) -> None:
        errors = _ErrorLog("The dashboard could not show what is new; it keeps trying.")
        while not self._clock.wait(
            self._publishing.stopping, _INTERVAL if self._publisher.is_watched else _INTERVAL_UNWATCHED
        ):
            with errors.logged():
                self._publish_once()

    def _publish_once(self) -> None:
        events, self._next_event, dropped = self._events.since(self._next_event)
        now = time.time()
        self._aggregator.add(events, dropped, now)
        self._aggregator.add_usage(self._usage)
        self._publisher.publish(self._aggregator.snapshot(now, self._statistics(), self._rules))

    def _poll_servers(self) -> None:
        errors = _ErrorLog("The dashboard could not read the servers' usage and the rules' counters; it keeps trying.")
        while not self._clock.wait(self._polling.stopping, _POLL_INTERVAL if self._usage else _INTERVAL):
            if not self._publisher.is_watched:
                continue
            with errors.logged():
                self._usage = self._read_usage()
                self._rules = self._read_rules()


class _ErrorLog:
    """Logs errors of repeated work with a message; logs an error that repeats only once."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._latest = ""

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Makes a scope that logs and suppresses an error."""
        try:
            yield
            self._latest = ""
        except Exception as error:
            if repr(error) != self._latest:
                self._latest = repr(error)
                _logger.exception(self._message)
