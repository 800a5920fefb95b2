"""Where a TCP connection ends."""

import dataclasses
import ipaddress

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A host and a port, in one spelling: without the zone of a link, and IPv4 as such where IPv6 carries it."""

    ip: _Ip
    port: int

    @classmethod
    def of(cls, host: str | bytes, port: int) -> "Endpoint":
        """Makes an endpoint from an IP address, as words or as the bytes that are sent."""
        ip = ipaddress.ip_address(host.partition("%")[0] if isinstance(host, str) else host)
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return cls(ip, port)
