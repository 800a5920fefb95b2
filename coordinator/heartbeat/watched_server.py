"""One server that a heartbeat watches: probed again and again, and hung up on while it is silent.

It runs on an asyncio loop, and promises that

- no probe of one server ever waits for another server's;
- the connections that are held for it are shut down when it falls silent, and new ones as long as it stays so;
- a pause of this very process, which makes probes late, is not taken for a server's silence.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Set

from coordinator.heartbeat.endpoint import Endpoint
from coordinator.heartbeat.open_connections import hang_up, peer_of
from coordinator.heartbeat.pulse import Pulse, PulseState
from coordinator.heartbeat.task_probe import AsyncTaskProbe

# A probe that ends later than this after its deadline, in seconds, says something of this process, not of the server.
_HELD_UP = 1.0


class WatchedServer:
    """Probes a server, and holds duplicates of the client's connections to it.

    Args:
      address: `host:port`.
      interval: from the start of a probe to that of the next, in seconds.
      timeout: a probe that is unanswered for so long finds the server silent, in seconds.
      tell: called with each change; before connections are shut down because of it.
    """

    def __init__(self, address: str, interval: float, timeout: float, tell: Callable[[Pulse], None]) -> None:
        self._address = address
        self._interval = interval
        self._timeout = timeout
        self._tell = tell
        self._pulse = Pulse(PulseState.UNKNOWN)
        self._connections: dict[int, socket.socket] = {}
        self._peers: set[Endpoint] = set()

    @property
    def is_silent(self) -> bool:
        """Whether its connections are shut down."""
        return self._pulse.state is PulseState.SILENT

    @property
    def peers(self) -> Set[Endpoint]:
        """Where the connections led that were ever held for it."""
        return self._peers

    async def run(self) -> None:
        """Probes the server until it is cancelled."""
        async with AsyncTaskProbe(self._address) as probe:
            while True:
                begun = time.monotonic()
                pulse = await self._look(probe)
                if pulse is not None:
                    self._change(pulse)
                await asyncio.sleep(max(0.0, begun + self._interval - time.monotonic()))

    def hold(self, identity: int, connection: socket.socket) -> None:
        """Takes a duplicate of a connection of the client."""
        self._connections[identity] = connection
        if (peer := peer_of(connection)) is not None:
            self._peers.add(peer)
        if self.is_silent:
            hang_up(connection)

    def release(self, identity: int) -> None:
        """Closes a duplicate: the client has closed its connection, and that must end it."""
        if (connection := self._connections.pop(identity, None)) is not None:
            connection.close()

    def close(self) -> None:
        """Closes every duplicate. The connections live on in the client."""
        for identity in list(self._connections):
            self.release(identity)

    def __repr__(self) -> str:
        return f"<WatchedServer {self._address}: {self._pulse.state.value}, {len(self._connections)} connections>"

    async def _look(self, probe: AsyncTaskProbe) -> Pulse | None:
        """What one probe shows; None if nothing."""
        begun = time.monotonic()
        try:
            status = await probe.status(self._timeout)
        except TimeoutError:
            now = time.monotonic()
            return Pulse(PulseState.SILENT, None, now) if now - begun < self._timeout + _HELD_UP else None
        if status is None:
            return Pulse(PulseState.GONE, None, time.monotonic())
        return Pulse(PulseState.ANSWERING, status.incarnation, time.monotonic())

    def _change(self, pulse: Pulse) -> None:
        if (pulse.state, pulse.incarnation) == (self._pulse.state, self._pulse.incarnation):
            return
        self._pulse = pulse
        self._tell(pulse)
        if self.is_silent:
            for connection in self._connections.values():
                hang_up(connection)
