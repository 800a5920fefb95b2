"""Tests of where the sockets that TensorFlow listens with can be reached."""

import contextlib
import os
import select
import socket
from collections.abc import Iterator

import pytest

from coordinator.errors import LaunchError
from coordinator.heartbeat import listening as module
from coordinator.heartbeat.listening import listen_only_at, loopback_of, own_address, reached_only_at
from tests.heartbeat.reach import DEADLINE, answers, own_addresses, own_ipv4_address


@contextlib.contextmanager
def listener(family: socket.AddressFamily) -> Iterator[socket.socket]:
    """Listens at all addresses, as TensorFlow does; IPv4 clients reach both families."""
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("", 0))
        listening.listen()
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def listen_in_scope(listening: socket.socket, port: int) -> None:
    """Begins to listen at all addresses, as TensorFlow does where ports are shared."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if listening.family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listening.bind(("", port))
    listening.listen()
    listening.setblocking(False)


FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])


@FAMILIES
@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.0.2", "::1"])
def test_one_loopback_address_alone_can_be_reached(family: socket.AddressFamily, loopback: str) -> None:
    with listener(family) as listening:
        port = port_of(listening)
        assert answers("127.0.0.1", port)
        listen_only_at(loopback, port)
        assert answers(loopback, port)
        others = {*own_addresses(), "127.0.0.1", "127.0.0.2", "::1"} - {loopback}
        assert not any(answers(address, port) for address in others)


def test_what_waits_for_connections_gets_them_as_before() -> None:
    with listener(socket.AF_INET6) as listening, select.epoll() as first, select.epoll() as second:
        port, descriptor = port_of(listening), listening.fileno()
        first.register(descriptor, select.EPOLLIN | select.EPOLLET)
        second.register(descriptor, select.EPOLLIN)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listen_only_at("127.0.0.1", port)
        assert first.poll(0) == second.poll(0) == []
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as client:
            assert first.poll(DEADLINE) == second.poll(DEADLINE) == [(descriptor, select.EPOLLIN)]
            # As TensorFlow does, which takes connections by the descriptor, until there is none.
            with socket.socket(fileno=listening.detach()) as same:
                accepted, _ = same.accept()
                with accepted:
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    client.sendall(b"hello")
                    assert accepted.recv(5) == b"hello"
                with pytest.raises(BlockingIOError):
                    same.accept()


def test_connections_made_before_are_shut_down_if_they_came_from_elsewhere() -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("", 0)))
        port = port_of(listening)
        own = own_ipv4_address()
        kept, ended = (opened.enter_context(socket.create_connection((host, port))) for host in ("127.0.0.2", own))
        for _ in (kept, ended):
            opened.enter_context(listening.accept()[0])
        listen_only_at("127.0.0.1", port)
        ended.settimeout(DEADLINE)
        assert ended.recv(1) == b""
        kept.settimeout(0.1)
        with pytest.raises(TimeoutError):
            kept.recv(1)


@FAMILIES
@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_others_never_reach_what_begins_to_listen_in_the_scope(
    family: socket.AddressFamily, loopback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
    with listener(family) as trial:
        port = port_of(trial)
    with socket.socket(family) as listening, contextlib.ExitStack() as opened:
        with reached_only_at(loopback, port):
            assert os.environ["TF_GRPC_REUSE_PORT"] == "true"
            listen_in_scope(listening, port)
            others = own_addresses()
            strangers = [opened.enter_context(socket.create_connection((each, port), DEADLINE)) for each in others]
            with pytest.raises(BlockingIOError):
                listening.accept()
            if family == socket.AF_INET6 or loopback == "127.0.0.1":
                opened.enter_context(socket.create_connection((loopback, port), DEADLINE))
                opened.enter_context(listening.accept()[0])
        assert "TF_GRPC_REUSE_PORT" not in os.environ
        assert answers(loopback, port)
        assert not any(answers(address, port) for address in others)
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_a_server_for_another_interface_is_not_reached_by_loopback_in_the_scope() -> None:
    own = own_ipv4_address()
    with listener(socket.AF_INET) as trial:
        port = port_of(trial)
    with socket.socket() as listening, reached_only_at(own, port):
        listen_in_scope(listening, port)
        with socket.create_connection(("127.0.0.1", port), DEADLINE), pytest.raises(BlockingIOError):
            listening.accept()
        with socket.create_connection((own, port), DEADLINE):
            listening.accept()[0].close()


def test_where_ports_cannot_be_shared_the_server_starts_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_can_share", lambda _: False)
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
    with listener(socket.AF_INET) as trial:
        port = port_of(trial)
    with socket.socket() as listening:
        with reached_only_at("127.0.0.1", port):
            assert "TF_GRPC_REUSE_PORT" not in os.environ
            listening.bind(("", port))
            listening.listen()
        assert answers("127.0.0.1", port)
        assert not any(answers(address, port) for address in own_addresses())


def test_what_fails_in_the_scope_leaves_nothing_behind() -> None:
    with listener(socket.AF_INET) as trial:
        port = port_of(trial)
    with pytest.raises(KeyError), reached_only_at("127.0.0.1", port):
        raise KeyError
    assert "TF_GRPC_REUSE_PORT" not in os.environ
    assert not any(answers(address, port) for address in own_addresses())
    with pytest.raises(OSError, match=f"no socket of this process listens on port {port}"):
        listen_only_at("127.0.0.1", port)


def test_the_host_of_an_address_says_where_it_is_served() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1"):
        assert loopback_of(host) == host
    assert [loopback_of(host) for host in ("localhost", "10.0.0.5", "a.b")] == ["127.0.0.1", None, None]
    for address in ("nonsense", "10.0.0.0/8", "192.0.2.77", ""):
        with pytest.raises(LaunchError, match="--interface must be an IP address of this machine"):
            own_address(address)
