"""The server of the dashboard and of `--health-port`, as strangers use it who send nothing, too little or too much."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from coordinator import http_server
from coordinator.http_server import HttpServer, Request
from tests.deadline import wait_until

REQUEST = b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"
NAME = "coordinator-test-server"


class Answers:
    """Answers with the path, or with a stream that `go` ends; `/wait` waits for `go`, too."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()

    def __call__(self, request: Request) -> None:
        self.begun += 1
        if request.path == "/stream":
            request.begin_stream("text/plain", {})
            while not self.go.wait(0.01):
                request.wfile.write(b".")
        elif request.path == "/wait":
            self.go.wait(60.0)
            request.send_text(HTTPStatus.OK, "waited")
        elif request.path == "/fail":
            raise KeyError("a defect")
        else:
            request.send_text(HTTPStatus.OK, request.path)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(answers: Answers) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, answers, name=NAME)
    yield server
    answers.go.set()
    server.close(30.0)
    assert not threads()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(NAME)]


def connect(server: HttpServer, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60.0)
    connection.sendall(content)
    return connection


def ask(server: HttpServer, content: bytes = REQUEST) -> bytes:
    """Returns all of the answer."""
    with connect(server, content) as connection, connection.makefile("rb") as answer:
        return answer.read()


def is_ended(connection: socket.socket) -> bool:
    """Returns True if the other end has closed a connection to which it sends nothing."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_request_may_come_in_pieces(server: HttpServer) -> None:
    with connect(server) as connection, connection.makefile("rb") as answer:
        for part in (REQUEST[:9], REQUEST[9:-3], REQUEST[-3:-1], REQUEST[-1:]):
            connection.sendall(part)
        assert answer.read().endswith(b"\r\n\r\n/page")


def test_strangers_cost_no_thread_and_keep_nobody_out(server: HttpServer) -> None:
    with contextlib.ExitStack() as opened:
        contents = [b"", b"GET /page HTTP/1.1\r\nX: "]
        strangers = [opened.enter_context(connect(server, contents[number % 2])) for number in range(500)]
        assert ask(server).endswith(b"/page")
        # Of those that answer, the one may not have ended yet.
        assert len(threads()) <= 2
        # The oldest ones have made room.
        wait_until(lambda: sum(map(is_ended, strangers)) >= 500 - 128)
        assert all(map(is_ended, strangers[: 500 - 128]))


def test_a_request_that_comes_byte_by_byte_is_ended_in_time(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_PEER_TIMEOUT", 0.1)
    with connect(server, b"GET / HTTP/1.1\r\nX: ") as connection:
        connection.settimeout(0.02)

        def is_left() -> bool:
            with contextlib.suppress(TimeoutError, OSError):
                connection.sendall(b"x")
            return is_ended(connection)

        wait_until(is_left)


def test_more_requests_than_may_be_answered_at_a_time_wait_for_their_turn(server: HttpServer, answers: Answers) -> None:
    content = REQUEST.replace(b"/page", b"/wait")
    with contextlib.ExitStack() as opened:
        waiting = [opened.enter_context(connect(server, content)) for _ in range(40)]
        wait_until(lambda: answers.begun == 32)
        answers.go.set()
        for connection in waiting:
            assert opened.enter_context(connection.makefile("rb")).read().endswith(b"waited")


def test_the_oldest_stream_ends_for_one_more_and_no_page_does(server: HttpServer, answers: Answers) -> None:
    content = REQUEST.replace(b"/page", b"/stream")
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(connect(server, content)) for _ in range(33)]
        wait_until(lambda: answers.begun == 33)
        assert ask(server).endswith(b"/page")
        # All that was sent has an end.
        assert opened.enter_context(streams[0].makefile("rb")).read()
        assert all(connection.recv(1) for connection in streams[1:])


def test_too_many_open_files_are_logged_once_and_waited_out(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [OSError(24, "Too many open files")] * 3
    accept = server._accept  # noqa: SLF001 - the system does not fail on request

    def fail(*, has_room: bool) -> None:
        if errors:
            raise errors.pop()
        accept(has_room=has_room)

    monkeypatch.setattr(server, "_accept", fail)
    assert ask(server).endswith(b"/page")
    assert caplog.text.count("cannot take connections; it keeps trying.") == 1


def test_closing_ends_silent_connections_at_once_and_streams_soon(answers: Answers) -> None:
    server = HttpServer("127.0.0.1", 0, answers, name=NAME)
    with connect(server), connect(server, REQUEST.replace(b"/page", b"/stream")) as stream:
        assert stream.recv(1)
        server.close(30.0)
        assert not threads()
