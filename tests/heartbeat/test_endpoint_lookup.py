import socket

import pytest

from coordinator.heartbeat.open_connections import Endpoint, EndpointLookup
from tests.virtual_clock import VirtualClock

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


def test_an_address_that_is_no_longer_needed_is_dropped(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1"]
    lookup = EndpointLookup()
    lookup.owners(["worker:80"])
    lookup.owners([])
    lookup.renew()
    assert lookup.owners(["worker:80"]) == {A: "worker:80"}
    assert names[""] == ["worker", "worker"]
