import socket
import time

import pytest

from coordinator.heartbeat import open_connections as endpoint_lookup
from coordinator.heartbeat.open_connections import Endpoint, EndpointLookup

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


def expire(lookup: EndpointLookup, address: str) -> None:
    lookup.valid_until[address] = time.monotonic()


@pytest.mark.parametrize("spelling", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_an_endpoint_has_one_spelling(spelling: str) -> None:
    assert Endpoint.of(spelling, 80) == Endpoint.of("127.0.0.1", 80)


def test_the_zone_of_a_link_is_left_out() -> None:
    assert Endpoint.of("fe80::1%eth0", 80) == Endpoint.of("fe80::1", 80)


def test_an_ip_address_is_its_own_endpoint() -> None:
    assert EndpointLookup().owners(["127.0.0.1:80", "[::1]:81"]) == {
        Endpoint.of("127.0.0.1", 80): "127.0.0.1:80",
        Endpoint.of("::1", 81): "[::1]:81",
    }


def test_a_name_has_all_its_addresses(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1", "10.0.0.2"]
    assert EndpointLookup().owners(["worker:80"]) == {A: "worker:80", B: "worker:80"}


def test_a_name_is_looked_up_once(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1"]
    lookup = EndpointLookup()
    for _ in range(3):
        lookup.owners(["worker:80"])
        lookup.renew()
    assert names[""] == ["worker"]


def test_a_name_that_moved_to_another_host_is_followed(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1"]
    lookup = EndpointLookup()
    lookup.owners(["worker:80"])
    names["worker"] = ["10.0.0.2"]
    expire(lookup, "worker:80")
    lookup.renew()
    assert lookup.owners(["worker:80"]) == {B: "worker:80"}


def test_a_name_that_is_unknown_for_a_moment_keeps_its_addresses(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1"]
    lookup = EndpointLookup()
    lookup.owners(["worker:80"])
    del names["worker"]
    expire(lookup, "worker:80")
    lookup.renew()
    assert lookup.owners(["worker:80"]) == {A: "worker:80"}


def test_an_unknown_name_has_no_endpoints_and_is_looked_up_again(names: dict[str, list[str]]) -> None:
    lookup = EndpointLookup()
    assert lookup.owners(["worker:80"]) == {}
    assert lookup.valid_until["worker:80"] < time.monotonic() + endpoint_lookup.KNOWN_LIFETIME / 2


def test_one_lookup_renews_one_name(names: dict[str, list[str]]) -> None:
    names |= {"one": ["10.0.0.1"], "two": ["10.0.0.2"]}
    lookup = EndpointLookup()
    lookup.owners(["one:80", "two:80"])
    expire(lookup, "two:80")
    expire(lookup, "one:80")
    lookup.renew()
    assert names[""] == ["one", "two", "two"]
    lookup.renew()
    assert names[""] == ["one", "two", "two", "one"]


def test_an_address_that_is_no_longer_needed_is_dropped(names: dict[str, list[str]]) -> None:
    names["worker"] = ["10.0.0.1"]
    lookup = EndpointLookup()
    lookup.owners(["worker:80"])
    lookup.owners([])
    lookup.renew()
    assert lookup.owners(["worker:80"]) == {A: "worker:80"}
    assert names[""] == ["worker", "worker"]
