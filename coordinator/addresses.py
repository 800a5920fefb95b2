"""Addresses of servers, `host:port`: the host is a name or an IP address; IPv6 stands in brackets, `[::1]:2222`."""

from typing import NamedTuple


class Address(NamedTuple):
    """The parts of a server's address.

    Attributes:
      host: as sockets take it: an IPv6 address without its brackets.
      port: from 1 to 65535.
    """

    host: str
    port: int


def parse_address(text: object) -> Address:
    """Splits `host:port`.

    Raises:
      ValueError: the text is not of that form.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.strip("[]")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError(f"An address must be 'host:port', got {text!r}.")
    return Address(host, int(port))
