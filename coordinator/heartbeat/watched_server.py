"""One server that a heartbeat watches: it is probed again and again; while it is silent, connections are shut down.

It runs on an asyncio loop. Promises:

- no probe of one server ever waits for another server's, and an unexpected error ends no other server's probes;
- the connections that are held for it are shut down when it falls silent, and new ones as long as it stays silent;
- a pause of this process, which makes probes late, is not taken for a server's silence.
"""

import asyncio
import dataclasses
import enum
import math
import socket
import sys
import time
import traceback
from collections.abc import Callable

from coordinator.heartbeat.obstacle import Obstacle, find_obstacle
from coordinator.heartbeat.open_connections import Endpoint, peer_of, shut_down
from coordinator.heartbeat.task_probe import AsyncTaskProbe


class Liveness(enum.Enum):
    """Whether a server answers, and if not, whether connections to it still look alive."""

    UNKNOWN = "unknown"
    ANSWERING = "answering"
    GONE = "gone"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class ServerState:
    """The state of one server.

    Attributes:
      liveness: ANSWERING; GONE, when connections to it are refused or something else answers; SILENT, when it neither
        answers nor refuses: frozen, or its host is gone; UNKNOWN, until the first probe has ended.
      incarnation: the number that the server drew when it started; None unless it is ANSWERING.
      since: when it began, in seconds on the clock of `time.monotonic`.
      obstacle: why it does not answer, if it is GONE or SILENT.
      last_silence: when it was last SILENT, on the same clock; connections to it that are older were shut down.
        Infinity while it is; minus infinity if it never was. Only the client's `Heartbeat` knows it.
    """

    liveness: Liveness
    incarnation: int | None = None
    since: float = 0.0
    obstacle: Obstacle | None = None
    last_silence: float = -math.inf


# After an unexpected error, in seconds.
_PAUSE = 5.0
# A probe that ends later than this after its deadline, in seconds, shows a pause of this process, not of the server.
_LONGEST_DELAY = 1.0


class WatchedServer:
    """Probes a server, and holds duplicates of the client's connections to it.

    Args:
      address: `host:port`.
      interval: from the start of a probe to that of the next, in seconds.
      timeout: the server is silent when a probe has been unanswered for this long, in seconds.
      report: called with each change; before connections are shut down because of it.

    Attributes:
      peers: the peers of all connections that were ever held for it.
    """

    def __init__(self, address: str, interval: float, timeout: float, report: Callable[[ServerState], None]) -> None:
        self._address = address
        self._interval = interval
        self._timeout = timeout
        self._report = report
        self._state = ServerState(Liveness.UNKNOWN)
        self._connections: dict[int, socket.socket] = {}
        self.peers: set[Endpoint] = set()

    @property
    def is_silent(self) -> bool:
        """Whether connections to it are being shut down."""
        return self._state.liveness is Liveness.SILENT

    async def run(self) -> None:
        """Probes the server until it is cancelled, also after unexpected errors, which are printed."""
        while True:
            try:
                await self._probe_again_and_again()
            except Exception:  # noqa: BLE001 - the next attempt may succeed, and other servers are watched all the same
                sys.stderr.write(
                    f"coordinator: the heartbeat of {self._address} met an unexpected error and goes on after "
                    f"{_PAUSE:g} s. This is a defect of coordinator; please report it.\n{traceback.format_exc()}"
                )
            await asyncio.sleep(_PAUSE)

    async def _probe_again_and_again(self) -> None:
        async with AsyncTaskProbe(self._address) as probe:
            while True:
                begun = time.monotonic()
                state = await self._probe_once(probe)
                if state is not None and not self._is_known(state):
                    if state.liveness is not Liveness.ANSWERING:
                        state = dataclasses.replace(state, obstacle=await find_obstacle(self._address))
                    self._set_state(state)
                await asyncio.sleep(max(0.0, begun + self._interval - time.monotonic()))

    def hold(self, identity: int, connection: socket.socket) -> None:
        """Keeps a duplicate of a connection of the client."""
        self._connections[identity] = connection
        if (peer := peer_of(connection)) is not None:
            self.peers.add(peer)
        if self.is_silent:
            shut_down(connection)

    def release(self, identity: int) -> None:
        """Closes a duplicate: the client has closed its connection, which only ends when all duplicates are closed."""
        if (connection := self._connections.pop(identity, None)) is not None:
            connection.close()

    def close(self) -> None:
        """Closes every duplicate. The connections stay open in the client."""
        for identity in list(self._connections):
            self.release(identity)

    async def _probe_once(self, probe: AsyncTaskProbe) -> ServerState | None:
        """Returns what one probe shows; None if it shows nothing."""
        begun = time.monotonic()
        try:
            status = await probe.status(self._timeout)
        except TimeoutError:
            now = time.monotonic()
            return ServerState(Liveness.SILENT, None, now) if now - begun < self._timeout + _LONGEST_DELAY else None
        if status is None:
            return ServerState(Liveness.GONE, None, time.monotonic())
        return ServerState(Liveness.ANSWERING, status.incarnation, time.monotonic())

    def _is_known(self, state: ServerState) -> bool:
        return (state.liveness, state.incarnation) == (self._state.liveness, self._state.incarnation)

    def _set_state(self, state: ServerState) -> None:
        self._state = state
        self._report(state)
        if self.is_silent:
            for connection in self._connections.values():
                shut_down(connection)
