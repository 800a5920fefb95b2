import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from coordinator.heartbeat.open_connections import Endpoint, OpenConnection, OpenConnections, peer_of, shut_down
from tests.deadline import wait_until


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def endpoint_of(server: socket.socket) -> Endpoint:
    host, port, *_ = server.getsockname()
    return Endpoint.of(host, port)


def identity_of(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


def found_for(server: socket.socket) -> list[OpenConnection]:
    return OpenConnections().find({endpoint_of(server)})


def test_the_connections_to_a_server_are_found_and_no_others(server: socket.socket) -> None:
    """Neither the server itself, nor what it accepts, nor those to a server on another host with the same port."""
    host, port = server.getsockname()
    with (
        socket.create_server(("127.0.0.2", port)) as neighbour,
        socket.create_connection((host, port)) as one,
        socket.create_connection((host, port)) as two,
        socket.create_connection(neighbour.getsockname()) as other,
        server.accept()[0],
    ):
        ours = [OpenConnection(identity_of(each), each.fileno(), endpoint_of(server)) for each in (one, two)]
        assert sorted(found_for(server), key=lambda found: found.descriptor) == ours
        assert [each.identity for each in found_for(neighbour)] == [identity_of(other)]
    assert found_for(server) == []


def test_a_connection_over_ipv6_to_an_ipv4_address_is_found(server: socket.socket) -> None:
    with socket.socket(socket.AF_INET6) as connection:
        connection.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
        assert [each.identity for each in found_for(server)] == [identity_of(connection)]


def test_a_connection_that_is_being_established_is_found_and_can_be_shut_down() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.create_connection(server.getsockname()),
        socket.socket() as connection,
    ):
        # The server's queue is full: its kernel answers no further request.
        connection.setblocking(False)
        connection.connect_ex(server.getsockname())
        with pytest.raises(OSError, match="not connected"):
            connection.getpeername()
        connections = OpenConnections()
        found = {each.identity: each for each in connections.find({endpoint_of(server)})}
        duplicate = connections.duplicate(found[identity_of(connection)])
        assert duplicate is not None
        with duplicate:
            shut_down(duplicate)
        assert peer_of(connection) is None


def test_all_connections_to_a_server_are_shut_down_and_no_others(server: socket.socket) -> None:
    host, port = server.getsockname()
    with (
        socket.create_server(("127.0.0.2", port)) as neighbour,
        socket.create_connection((host, port)) as one,
        socket.create_connection((host, port)) as two,
        socket.create_connection(neighbour.getsockname()) as other,
    ):
        assert OpenConnections().shut_down(f"{host}:{port}") == 2
        assert [one.recv(1), two.recv(1)] == [b"", b""]
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_connection_that_has_ended_may_be_shut_down() -> None:
    with socket.socket() as never_made:
        shut_down(never_made)
    shut_down(never_made)


def test_other_descriptors_than_tcp_connections_have_no_peer() -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(("127.0.0.1", 9))
        assert [peer_of(each) for each in (one, other, datagrams)] == [None] * 3


def test_a_duplicate_is_the_same_connection(server: socket.socket) -> None:
    connections = OpenConnections()
    with socket.create_connection(server.getsockname()) as connection, server.accept()[0] as accepted:
        [found] = connections.find({endpoint_of(server)})
        duplicate = connections.duplicate(found)
        assert duplicate is not None
        with duplicate:
            assert duplicate.fileno() != connection.fileno()
            duplicate.shutdown(socket.SHUT_RDWR)
        assert connection.recv(1) == b""
        assert accepted.recv(1) == b""


def test_a_reused_descriptor_gives_no_duplicate(server: socket.socket) -> None:
    connections = OpenConnections()
    with socket.create_connection(server.getsockname()) as connection:
        [found] = connections.find({endpoint_of(server)})
        with socket.socket() as other:
            os.dup2(other.fileno(), connection.fileno())
            assert connections.duplicate(found) is None
    assert connections.duplicate(found) is None


def test_connections_may_open_and_close_during_a_search(server: socket.socket) -> None:
    connections, stop, errors = OpenConnections(), threading.Event(), []

    def churn() -> None:
        try:
            while not stop.is_set():
                with socket.create_connection(server.getsockname()) as connection, server.accept()[0] as accepted:
                    accepted.sendall(b"x")
                    assert connection.recv(1) == b"x"
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=churn)
    # Accepted before the thread accepts too: each must get its own connection.
    with socket.create_connection(server.getsockname()) as connection, server.accept()[0]:
        thread.start()
        for _ in range(300):
            assert identity_of(connection) in {each.identity for each in connections.find({endpoint_of(server)})}
    stop.set()
    thread.join()
    assert errors == []


def test_no_descriptor_is_left_behind(server: socket.socket) -> None:
    connections = OpenConnections()
    with socket.create_connection(server.getsockname()):
        before = os.listdir("/proc/self/fd")
        for _ in range(10):
            connections.find({endpoint_of(server)})
        assert os.listdir("/proc/self/fd") == before


def test_the_connections_of_a_child_are_found_if_the_system_allows_it(server: socket.socket) -> None:
    host, port = server.getsockname()
    program = f"import socket; s = socket.create_connection(({host!r}, {port})); s.recv(1)"
    with subprocess.Popen([sys.executable, "-c", program]) as child, server.accept()[0] as accepted:
        connections = OpenConnections(child.pid)
        if found := connections.find({endpoint_of(server)}):
            duplicate = connections.duplicate(found[0])
            assert duplicate is not None
            with duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        else:
            accepted.sendall(b"x")
        wait_until(lambda: child.poll() is not None)


def test_an_ended_process_has_no_connections(server: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert OpenConnections(child.pid).find({endpoint_of(server)}) == []
