import socket

import pytest

from coordinator.errors import LaunchError
from coordinator.launch import server_process as module
from coordinator.launch.server_process import free_addresses


def test_every_address_is_different_and_can_be_served_on() -> None:
    addresses = free_addresses(50)
    assert len(set(addresses)) == 50
    for address in addresses:
        with listening_on(address):
            pass


def test_the_port_of_a_server_that_ended_a_moment_ago_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    [address] = free_addresses(1)
    host, port = address.partition(":")[::2]
    with listening_on(address) as listener, socket.create_connection((host, int(port))):
        # The end that closes first keeps the port in the state TIME_WAIT for a minute.
        listener.accept()[0].close()
    monkeypatch.setattr(module, "PORTS", range(int(port), int(port) + 1))
    assert free_addresses(1) == [address]
    with listening_on(address):
        pass


def listening_on(address: str) -> socket.socket:
    """Returns a socket that listens as servers do: also on a port whose last connection ended a moment ago."""
    host, _, port = address.partition(":")
    return socket.create_server((host, int(port)))


def test_outgoing_connections_are_never_given_such_a_port() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        lowest = int(limits.read().split()[0])
    assert all(int(address.partition(":")[2]) < lowest for address in free_addresses(50))


def test_taken_ports_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_on(free_addresses(1)[0]) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(module, "PORTS", range(taken, taken + 1))
        monkeypatch.setattr(module, "_MOST_ATTEMPTS", 20)
        with pytest.raises(LaunchError, match="no 1 free ports"):
            free_addresses(1)


def test_addresses_of_servers_that_are_down_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    [address] = free_addresses(1)
    port = int(address.partition(":")[2])
    monkeypatch.setattr(module, "PORTS", range(port, port + 1))
    monkeypatch.setattr(module, "_MOST_ATTEMPTS", 20)
    with pytest.raises(LaunchError):
        free_addresses(1, besides=[address])
