import socket

import pytest

from coordinator.addresses import check_port_is_free, parse_address
from coordinator.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("host:1", "host", 1), ("127.0.0.1:65535", "127.0.0.1", 65535), ("[::1]:2222", "::1", 2222)],
)
def test_an_address_is_split_into_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "[]:80", "host:port", "host:0", "host:65536", None, 80])
def test_an_invalid_address_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be 'host:port', got"):
        parse_address(text)


def test_a_port_in_use_is_named_with_how_to_find_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = (
            f"/job:worker/task:0 cannot serve on host:{port}: port {port}: Address already in use.*:{port}` shows it"
        )
        with pytest.raises(LaunchError, match=words):
            check_port_is_free("/job:worker/task:0", f"host:{port}")
    check_port_is_free("/job:worker/task:0", f"host:{port}")
