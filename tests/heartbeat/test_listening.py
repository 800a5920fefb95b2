"""Tests of where the sockets that TensorFlow listens with can be reached."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from coordinator.errors import LaunchError
from coordinator.heartbeat.listening import accept_only_at, networks_of, own_network
from tests.heartbeat.reach import DEADLINE, MOMENT, answers, own_addresses


@contextlib.contextmanager
def listener(family: socket.AddressFamily) -> Iterator[int]:
    """A port on which this process listens at all addresses, as TensorFlow does; IPv4 clients reach both families."""
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("", 0))
        listening.listen()
        yield listening.getsockname()[1]


FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])


@FAMILIES
def test_only_one_address_can_be_reached(family: socket.AddressFamily) -> None:
    with listener(family) as port:
        assert answers("127.0.0.1", port)
        assert answers("127.0.0.2", port)
        accept_only_at(own_network("127.0.0.2"), port)
        assert not answers("127.0.0.1", port, MOMENT)
        assert answers("127.0.0.2", port)


@FAMILIES
def test_loopback_cannot_be_reached_from_other_addresses(family: socket.AddressFamily) -> None:
    networks = networks_of("localhost")
    assert networks is not None
    with listener(family) as port:
        accept_only_at(networks, port)
        assert answers("127.0.0.1", port)
        assert not any(answers(address, port, MOMENT) for address in own_addresses())


def test_connections_made_before_the_filter_are_shut_down() -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("", 0)))
        port = listening.getsockname()[1]
        kept, ended = (
            opened.enter_context(socket.create_connection((host, port))) for host in ("127.0.0.2", "127.0.0.3")
        )
        for _ in (kept, ended):
            opened.enter_context(listening.accept()[0])
        accept_only_at(own_network("127.0.0.2"), port)
        ended.settimeout(DEADLINE)
        assert ended.recv(1) == b""
        kept.settimeout(0.1)
        with pytest.raises(TimeoutError):
            kept.recv(1)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("10.0.0.5", False), ("a.b", False)],
)
def test_the_host_of_an_address_says_who_reaches_it(host: str, is_loopback: bool) -> None:
    assert (networks_of(host) is not None) == is_loopback


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.0/8", "192.0.2.77", ""])
def test_an_interface_must_be_an_address_of_this_machine(address: str) -> None:
    with pytest.raises(LaunchError, match="--interface must be an IP address of this machine"):
        own_network(address)


def test_a_port_without_a_listener_is_an_error() -> None:
    with listener(socket.AF_INET) as port:
        pass
    with pytest.raises(OSError, match=f"no socket of this process listens on port {port}"):
        accept_only_at(own_network("127.0.0.1"), port)
