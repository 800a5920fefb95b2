import pytest

from coordinator.addresses import parse_address


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
