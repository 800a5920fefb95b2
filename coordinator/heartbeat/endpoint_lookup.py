"""Which endpoints the addresses of servers stand for, as far as names are known by now.

Several hosts may serve on one port, so a connection is told by its IP address; and a name may come to stand for another
one, as when a pod is replaced. A look-up may take as long as the network makes it: it happens when an address is new,
and then to one address at a time.
"""

import contextlib
import socket
import time
from collections.abc import Collection

from coordinator.heartbeat.endpoint import Endpoint

# How long an answer holds, and how long it takes until a name that was unknown is looked up again, in seconds.
_KNOWN_LIFETIME, _UNKNOWN_LIFETIME = 60.0, 5.0


class EndpointLookup:
    """Looks up addresses, and remembers what they stand for. One thread at a time may use it."""

    def __init__(self) -> None:
        self._endpoints: dict[str, frozenset[Endpoint]] = {}
        self._holds_until: dict[str, float] = {}

    def owners(self, addresses: Collection[str]) -> dict[Endpoint, str]:
        """Returns the endpoints of some addresses, each with its address.

        Args:
          addresses: `host:port` each. All others are forgotten.
        """
        for address in self._endpoints.keys() - set(addresses):
            del self._endpoints[address], self._holds_until[address]
        for address in addresses:
            if address not in self._endpoints:
                self._look_up(address)
        return {endpoint: address for address in addresses for endpoint in self._endpoints[address]}

    def renew(self) -> None:
        """Looks up again the one whose answer is the oldest, if that no longer holds."""
        oldest = min(self._holds_until, key=self._holds_until.__getitem__, default=None)
        if oldest is not None and self._holds_until[oldest] <= time.monotonic():
            self._look_up(oldest)

    def _look_up(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        found = self._endpoints.get(address, frozenset())
        # A name that is unknown for the moment keeps what it stood for.
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            found = frozenset(Endpoint.of(str(endpoint[0]), int(port)) for *_, endpoint in infos)
        self._endpoints[address] = found
        self._holds_until[address] = time.monotonic() + (_KNOWN_LIFETIME if found else _UNKNOWN_LIFETIME)
