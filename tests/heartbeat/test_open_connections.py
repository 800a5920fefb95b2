"""Tests of which connections to a server a process has, and of the addresses that a server's name stands for."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.heartbeat.open_connections import (
    Endpoint,
    EndpointLookup,
    OpenConnection,
    OpenConnections,
    peer_of,
    shut_down,
)
from tests.deadline import LIMIT
from tests.virtual_clock import VirtualClock


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


def test_the_connections_to_a_server_are_found_and_shut_down_and_no_others(server: socket.socket) -> None:
    """Neither the server itself, nor what it accepts, nor those to a server on another host with the same port."""
    host, port = server.getsockname()
    before = os.listdir("/proc/self/fd")
    with (
        socket.create_server(("127.0.0.2", port)) as neighbour,
        socket.create_connection((host, port)) as one,
        socket.socket(socket.AF_INET6) as two,
        socket.create_connection(neighbour.getsockname()) as other,
        server.accept()[0],
    ):
        two.connect((f"::ffff:{host}", port))
        ours = [OpenConnection(identity_of(each), each.fileno(), endpoint_of(server)) for each in (one, two)]
        assert sorted(found_for(server), key=lambda found: found.descriptor) == ours
        assert [each.identity for each in found_for(neighbour)] == [identity_of(other)]
        assert OpenConnections().shut_down(f"{host}:{port}") == 2
        assert [one.recv(1), two.recv(1)] == [b"", b""]
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
    assert found_for(server) == []
    assert os.listdir("/proc/self/fd") == before, "no descriptor is left behind"
    for family, kind in ((socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)):
        with socket.socket(family, kind) as no_connection:
            assert peer_of(no_connection) is None


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


def test_a_duplicate_is_the_same_connection_and_a_reused_descriptor_gives_none(server: socket.socket) -> None:
    connections = OpenConnections()
    with socket.create_connection(server.getsockname()) as connection, server.accept()[0] as accepted:
        [found] = connections.find({endpoint_of(server)})
        duplicate = connections.duplicate(found)
        assert duplicate is not None
        with duplicate:
            assert duplicate.fileno() != connection.fileno()
            for _ in range(2):
                shut_down(duplicate)
        assert (connection.recv(1), accepted.recv(1)) == (b"", b"")
        with socket.socket() as other:
            os.dup2(other.fileno(), connection.fileno())
            assert connections.duplicate(found) is None
    assert connections.duplicate(found) is None


def test_connections_may_open_and_close_during_a_search(server: socket.socket) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            with socket.create_connection(server.getsockname()), server.accept()[0]:
                pass

    # Accepted before the thread accepts too: each must get its own connection.
    with socket.create_connection(server.getsockname()) as connection, server.accept()[0], ThreadPoolExecutor() as pool:
        churning = pool.submit(churn)
        try:
            for _ in range(100):
                assert identity_of(connection) in {each.identity for each in found_for(server)}
        finally:
            stop.set()
        churning.result(LIMIT)


A, B = Endpoint.of("10.0.0.1", 80), Endpoint.of("10.0.0.2", 80)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The records of a name server, and, under the empty name, the names that were looked up."""
    names: dict[str, list[str]] = {"": []}

    def answer(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        names[""].append(host)
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return names


def test_an_endpoint_has_one_spelling_and_no_zone() -> None:
    assert Endpoint.of("::ffff:127.0.0.1", 80) == Endpoint.of("127.0.0.1", 80)
    assert Endpoint.of("fe80::1%eth0", 80) == Endpoint.of("fe80::1", 80)
    assert EndpointLookup().owners(["127.0.0.1:80", "[::1]:81"]) == {
        Endpoint.of("127.0.0.1", 80): "127.0.0.1:80",
        Endpoint.of("::1", 81): "[::1]:81",
    }


def test_a_name_is_looked_up_once_until_its_addresses_expire(names: dict[str, list[str]]) -> None:
    names["worker"], clock = ["10.0.0.1", "10.0.0.2"], VirtualClock()
    lookup = EndpointLookup(clock)
    for _ in range(3):
        assert lookup.owners(["worker:80"]) == {A: "worker:80", B: "worker:80"}
        lookup.renew()
    assert names[""] == ["worker"]
    for present, found in ((["10.0.0.2"], {B: "worker:80"}), ([], {})):
        names["worker"] = present
        clock.advance(60.0)
        lookup.renew()
        assert lookup.owners(["worker:80"]) == found
    # One that is no longer needed is dropped.
    lookup.owners([])
    lookup.renew()
    names["worker"] = ["10.0.0.1"]
    assert lookup.owners(["worker:80"]) == {A: "worker:80"}


def test_a_name_that_is_unknown_keeps_its_addresses_and_is_looked_up_soon(names: dict[str, list[str]]) -> None:
    names["worker"], clock = ["10.0.0.1"], VirtualClock()
    lookup = EndpointLookup(clock)
    lookup.owners(["worker:80", "unknown:80"])
    del names["worker"]
    clock.advance(5.0)
    lookup.renew()
    lookup.renew()
    assert names[""] == ["worker", "unknown", "unknown"]
    clock.advance(60.0)
    for _ in range(2):
        lookup.renew()
    assert sorted(names[""][3:]) == ["unknown", "worker"], "one look-up renews one name"
    assert lookup.owners(["worker:80", "unknown:80"]) == {A: "worker:80"}
