"""A small HTTP server, for the client's dashboard and for the health page of each server of the cluster.

    NAME-accept     accepts connections, and reads the requests of all of them
    NAME-request    one for each complete request: answers it, and ends the connection

Unknown peers may connect. Guarantees:

- A connection uses a thread only while its request is answered, and ends after 10 s without a complete request.
- At most 128 connections wait. A new connection replaces the oldest that has sent no complete request for 0.1 s. So a
  peer that sends its request immediately is answered, even if many peers send nothing.
- A request whose `Host` is not this machine is refused. So another site cannot read anything by making its own name
  resolve to this machine's address (DNS rebinding).
- Only GET is answered. A peer that accepts no data for 10 seconds is disconnected.
"""

import collections
import contextlib
import functools
import http.server
import io
import ipaddress
import logging
import re
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from coordinator.background_thread import BackgroundThread, start_once

_logger = logging.getLogger("coordinator")

# How long a peer may take to send a whole request, or to accept data of an answer, in seconds.
_PEER_TIMEOUT = 10.0
# `_MOST_WAITING` connections may be unanswered. A new connection may replace one that is `_SHORTEST_WAIT` seconds old.
_MOST_WAITING, _SHORTEST_WAIT = 128, 0.1
# A request beyond `_MOST_ANSWERS` waits for another answer's end; a stream beyond `_MOST_STREAMS` ends the oldest one.
_MOST_ANSWERS, _MOST_STREAMS = 32, 32
_LONGEST_REQUEST = 1 << 16
_HEAD_END = re.compile(rb"\r?\n\r?\n")
# The server pauses `_PAUSE` seconds after an error. `close` gives running answers `_GRACE` seconds to finish.
_PAUSE, _GRACE = 0.1, 1.0


class HttpServer:
    """An HTTP server that serves from its creation until it is closed.

    Args:
      host: the local name or IP address to listen on; `::` means all addresses, of IPv4 too.
      port: the port, 0 for any free port. The attribute `port` is the port in use.
      answer: a function that answers a request, called on a separate thread.
      name: the prefix of its threads' names.
      names: accepted host names of this machine, in addition to `localhost` and the machine's addresses.

    Raises OSError if the server cannot listen there, OverflowError for a port out of range.
    """

    def __init__(
        self, host: str, port: int, answer: "Callable[[Request], None]", *, name: str, names: Collection[str] = ()
    ) -> None:
        self.answer = answer
        self._name = name
        self._names = {"localhost", *map(str.lower, names)}
        self._listener = _listening(host, port)
        own, self.port = self._listener.getsockname()[:2]
        self.is_loopback = ipaddress.ip_address(own).is_loopback
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        # Descriptor -> connection, oldest first. Until the accepting thread ends, no other uses the next three
        # attributes.
        self._waiting: dict[int, _Waiting] = {}
        self._complete: collections.deque[_Waiting] = collections.deque()
        self._threads: list[threading.Thread] = []
        # Guards `_answers` and `_streams`.
        self._lock = threading.Lock()
        self._answers: dict[threading.Thread, _Waiting] = {}
        self._streams: dict[threading.Thread, _Waiting] = {}
        self._thread = BackgroundThread(f"{name}-accept", self._serve, finish=self._release)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Ends all connections and threads in `timeout` seconds; cuts streams that have not ended."""
        deadline = time.monotonic() + timeout
        self._thread.stop()
        self._wake()
        self._thread.wait_stopped()
        self._join_answers(time.monotonic() + min(_GRACE, timeout))
        with self._lock:
            for answered in (*self._answers.values(), *self._streams.values()):
                _shut(answered.connection)
        self._join_answers(deadline)
        self._waker.close()

    def _join_answers(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def is_own_host(self, host: str | None) -> bool:
        """Returns whether a request's `Host` names this machine, not a site that resolves to its address."""
        if host is None:  # Every browser sends the header.
            return True
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name or "")
        except ValueError:
            return not self.is_loopback and name == socket.gethostname().lower()
        return address.is_loopback or not self.is_loopback

    def begin_stream(self) -> None:
        """Counts this thread's answer as a stream, so that the limit of streams applies, not the limit of answers."""
        with self._lock:
            thread = threading.current_thread()
            self._streams[thread] = self._answers.pop(thread)
            if len(self._streams) > _MOST_STREAMS:
                # The age of the connection decides, because threads that start together call this in any order.
                oldest = min(self._streams, key=lambda thread: self._streams[thread].began)
                _shut(self._streams.pop(oldest).connection)
        self._wake()

    def _serve(self) -> None:
        is_failing = False
        while not self._thread.stopping.is_set():
            try:
                self._turn()
                is_failing = False
            except Exception:
                # For example, too many files are open, or there are too many threads.
                if not is_failing:
                    _logger.exception("%s cannot take connections; it keeps trying.", self._name)
                is_failing = True
                self._thread.stopping.wait(_PAUSE)

    def _release(self) -> None:
        for waiting in (*self._waiting.values(), *self._complete):
            waiting.connection.close()
        self._listener.close()
        self._woken.close()

    def _turn(self) -> None:
        self._start_answers()
        now = time.monotonic()
        while (oldest := next(iter(self._waiting.values()), None)) is not None and oldest.deadline <= now:
            self._drop_oldest()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        for descriptor in self._waiting:
            poll.register(descriptor, select.POLLIN)
        wait = None if oldest is None else oldest.deadline - now
        has_room = len(self._waiting) + len(self._complete) < _MOST_WAITING
        if has_room or (oldest is not None and now >= oldest.replaceable_at):
            poll.register(self._listener, select.POLLIN)
        elif oldest is not None:
            wait = oldest.replaceable_at - now
        for descriptor, _ in poll.poll(None if wait is None else 1000.0 * max(0.0, wait)):
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
            elif descriptor == self._listener.fileno():
                self._accept(has_room=has_room)
            elif descriptor in self._waiting:
                self._receive(descriptor)

    def _accept(self, *, has_room: bool) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Too many files are open. Dropping the oldest connection makes room.
            if not self._waiting:
                raise
            self._drop_oldest()
            return
        connection.setblocking(False)
        if not has_room:
            self._drop_oldest()
        self._waiting[connection.fileno()] = _Waiting(connection)

    def _drop_oldest(self) -> None:
        self._waiting.pop(next(iter(self._waiting))).connection.close()

    def _receive(self, descriptor: int) -> None:
        waiting = self._waiting[descriptor]
        before = len(waiting.received)
        try:
            waiting.received += waiting.connection.recv(_LONGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            # A broken connection is treated as if the peer had sent everything.
            pass
        # The end of the head may arrive in two pieces.
        if _HEAD_END.search(waiting.received, max(0, before - 3)):
            self._complete.append(self._waiting.pop(descriptor))
        elif len(waiting.received) == before or len(waiting.received) > _LONGEST_REQUEST:
            self._waiting.pop(descriptor).connection.close()

    def _start_answers(self) -> None:
        while self._complete and len(self._answers) < _MOST_ANSWERS:
            waiting = self._complete.popleft()
            with self._lock:
                try:
                    thread = start_once(f"{self._name}-request", functools.partial(self._respond, waiting))
                except RuntimeError:
                    waiting.connection.close()
                    raise
                self._answers[thread] = waiting
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _respond(self, waiting: "_Waiting") -> None:
        try:
            with waiting.connection as connection:
                connection.settimeout(_PEER_TIMEOUT)
                try:
                    Request(self, connection, bytes(waiting.received))
                except OSError:  # The peer has gone, or accepts no data.
                    return
                except Exception:
                    _logger.exception("%s could not answer a request.", self._name)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                    # Unread data would make the peer see a connection reset instead of the answer.
                    connection.setblocking(False)
                    connection.recv(_LONGEST_REQUEST)
        finally:
            with self._lock:
                self._answers.pop(threading.current_thread(), None)
                self._streams.pop(threading.current_thread(), None)
            self._wake()

    def _wake(self) -> None:
        # A full buffer wakes the thread anyway; a closed server needs no wake-up.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")


class _Waiting:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.began = time.monotonic()
        self.deadline = self.began + _PEER_TIMEOUT
        self.replaceable_at = self.began + _SHORTEST_WAIT


class Request(http.server.BaseHTTPRequestHandler):
    """A received request. The constructor makes the server answer the request on the connection."""

    server_version, sys_version = "coordinator", ""

    def __init__(self, server: HttpServer, connection: socket.socket, received: bytes) -> None:
        # The base class's constructor is not called, because it would read the request from the connection.
        self._server = server
        self.client_address = ("", 0)
        self.rfile = io.BytesIO(received)
        self.wfile = _Writer(connection)
        self.handle_one_request()

    def do_GET(self) -> None:
        """Calls the server's `answer` if the request's `Host` is this machine, and refuses the request otherwise."""
        if self._server.is_own_host(self.headers.get("Host")):
            self._server.answer(self)
        else:
            text = "This server is not known by that host name. Use the address of the machine.\n"
            self.send_text(HTTPStatus.FORBIDDEN, text)

    def send_text(self, status: HTTPStatus, text: str) -> None:
        self.send(status, "text/plain; charset=utf-8", text.encode())

    def send(
        self, status: HTTPStatus, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send_head(status, {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def begin_stream(self, content_type: str, headers: Mapping[str, str]) -> None:
        """Begins an answer whose body the caller then writes to `wfile` in pieces."""
        self._server.begin_stream()
        self._send_head(HTTPStatus.OK, {"Content-Type": content_type, **headers})

    def _send_head(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base gives it
        """Logs nothing: each request may contain a token."""


class _Writer(io.BufferedIOBase):
    """Sends all that is written, within the timeout of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, content: Any) -> int:
        """Sends all of `content`."""
        self._connection.sendall(content)
        return len(content)


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::" and socket.has_dualstack_ipv6():
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((host, port))
        # Many connections may wait to be accepted.
        listening.listen(socket.SOMAXCONN)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _shut(connection: socket.socket) -> None:
    # The connection may have ended already.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
