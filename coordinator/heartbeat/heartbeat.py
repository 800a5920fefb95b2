"""Keeps an eye on the servers, and ends the calls to those that fall silent.

A call to a server that is frozen, or whose host is gone, would never return: the connection looks alive. Here it is
shut down, so that the call fails as if the server had been killed.

    client                                                 heartbeat process
    user's and workers' threads -- is_silent, wait_changed
    coordinator-heartbeat -- watch, forget, connections --> probes every server; shuts down the
                          <------- changes of state ------- connections to those that are silent

The thread of the client finds connections and passes duplicates of them on; the process acts on them alone, since all
threads of the client may stand still in the call that has to be ended.

It ends the calls of this process alone. A worker's call to a frozen parameter server lasts, and with it the client's
call to that worker, until somebody hangs up on the worker too (`OpenConnections.shut_down`).

Promises: no method waits for a server, or for another thread that does; when the process dies, it is started again;
`close` leaves neither thread nor process.
"""

import contextlib
import itertools
import logging
import math
import select
import socket
import threading
import time
from typing import Any

from coordinator.heartbeat.endpoint_lookup import EndpointLookup
from coordinator.heartbeat.heartbeat_client import HeartbeatChild
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.pulse import Pulse, PulseState

_logger = logging.getLogger("coordinator")

# Connections that gRPC opens to a silent server hold calls up until they are passed on, so it looks more often then.
_SILENT_INTERVAL = 0.1
# The process that cannot do its work is started again after longer and longer pauses, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 60.0
_END_TIMEOUT = 5.0
_UNKNOWN = Pulse(PulseState.UNKNOWN)


class Heartbeat:
    """Says which servers answer, and hangs up on those that neither answer nor refuse.

    Every method may be called on any thread.

    Args:
      interval: from one probe of a server to the next, in seconds.
      timeout: a probe that is unanswered for so long finds the server silent, in seconds.
    """

    def __init__(self, interval: float = 1.0, timeout: float = 5.0) -> None:
        self._interval = interval
        self._timeout = timeout
        self._changed = threading.Condition()
        self._generation = 0
        # Guarded by the condition's lock; looked up without it. A number is never used again, so that news of an
        # address that was forgotten are not taken for news of the same one, watched again.
        self._numbers = itertools.count()
        self._watched: dict[str, int] = {}
        self._pulses: dict[str, Pulse] = {}
        self._silences: dict[str, float] = {}
        self._closed = False
        self._alarm, self._alarm_end = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarm_end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="coordinator-heartbeat", daemon=True)
        # From here on, what the thread alone uses.
        self._child: HeartbeatChild | None = None
        self._connections = OpenConnections()
        self._lookup = EndpointLookup()
        self._pause = _FIRST_PAUSE
        self._start_at = 0.0

    def start(self) -> None:
        """Starts the thread, and with it the process."""
        self._thread.start()

    def watch(self, address: str) -> None:
        """Begins to watch a server, if it is not watched yet, and looks for connections to it at once.

        Args:
          address: its `host:port`.

        Raises:
          ValueError: that is none.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"A server's address is host:port, got {address!r}.")
        with self._changed:
            if address not in self._watched:
                self._watched[address] = next(self._numbers)
        self._ring()

    def forget(self, address: str) -> None:
        """Watches a server no more; connections to it stay as they are. One that is not watched may be forgotten."""
        with self._changed:
            self._watched.pop(address, None)
            self._pulses.pop(address, None)
            self._silences.pop(address, None)
        self._ring()

    def state(self, address: str) -> Pulse:
        """What is known of a server."""
        return self._pulses.get(address, _UNKNOWN)

    def is_silent(self, address: str) -> bool:
        """Whether calls to a server are being ended because it neither answers nor refuses."""
        return self.state(address).state is PulseState.SILENT

    def last_silence(self, address: str) -> float:
        """When a server was last found silent, or still was, in seconds on the clock of `time.monotonic`.

        Connections to it that are older were shut down. Infinity while it is silent; minus infinity if it never was.
        """
        return self._silences.get(address, -math.inf)

    def wait_changed(self, generation: int, timeout: float) -> int:
        """Waits until the state of any server changes.

        Args:
          generation: what this returned last; 0 before.
          timeout: in seconds.

        Returns:
          The number of changes so far, at once if it differs from `generation`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation, timeout)
            return self._generation

    def close(self) -> None:
        """Ends the thread and the process. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if self._thread.ident is None:
            self._alarm.close()
            self._alarm_end.close()
            return
        self._ring()
        self._thread.join(2 * _END_TIMEOUT)
        if self._thread.is_alive():
            _logger.warning("The heartbeat's thread looks up a host's name, and is left behind until it is done.")

    def __repr__(self) -> str:
        states = ", ".join(f"{address} {self.state(address).state.value}" for address in self._watched)
        return f"<Heartbeat: {states or 'watches nothing'}>"

    def _run(self) -> None:
        try:
            while not self._closed:
                self._keep_child()
                self._pass_on()
                self._wait_news(self._tick())
                self._hear()
        finally:
            if self._child is not None:
                self._child.end(_END_TIMEOUT)
            self._alarm.close()
            self._alarm_end.close()

    def _tick(self) -> float:
        any_silent = any(pulse.state is PulseState.SILENT for pulse in list(self._pulses.values()))
        return min(self._interval, _SILENT_INTERVAL) if any_silent or self._child is None else self._interval

    def _ring(self) -> None:
        """Wakes the thread. It needs no second call while it has not heard the first, nor any once it has ended."""
        with contextlib.suppress(OSError):
            self._alarm.send(b"\0")

    def _wait_news(self, timeout: float) -> None:
        """Waits until the process says something, somebody rings, or the time is over."""
        sources: list[Any] = [self._alarm_end, *([self._child] if self._child is not None else [])]
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        poll.poll(timeout * 1000)
        with contextlib.suppress(BlockingIOError):
            self._alarm_end.recv(4096)

    def _keep_child(self) -> None:
        if self._child is not None or time.monotonic() < self._start_at:
            return
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        try:
            self._child = HeartbeatChild(self._interval, self._timeout)
        except OSError as error:
            _logger.warning("The heartbeat process cannot be started; another attempt follows. (%s)", error)

    def _hear(self) -> None:
        if self._child is None:
            return
        messages = self._child.receive()
        if messages is None:
            child, self._child = self._child, None
            code = child.end(_END_TIMEOUT)
            _logger.warning("The heartbeat process (%d) ended with code %d; it is started again.", child.pid, code)
            return
        if messages:
            self._pause = _FIRST_PAUSE
        for message in messages:
            pulse = Pulse(PulseState(message["state"]), message["incarnation"], message["since"])
            self._take(message["number"], pulse)

    def _take(self, number: int, pulse: Pulse) -> None:
        with self._changed:
            address = next((name for name, known in self._watched.items() if known == number), None)
            if address is None:
                return
            before = self.state(address)
            if (before.state, before.incarnation) == (pulse.state, pulse.incarnation):
                return
            self._pulses[address] = pulse
            if pulse.state is PulseState.SILENT:
                self._silences[address] = math.inf
            elif before.state is PulseState.SILENT:
                self._silences[address] = pulse.since
            self._generation += 1
            self._changed.notify_all()
        if pulse.state is PulseState.SILENT:
            _logger.warning(
                "%s has not answered for %g s; connections to it are shut down until it does.", address, self._timeout
            )
        elif before.state is PulseState.SILENT:
            seconds = pulse.since - before.since + self._timeout
            how = "answers again" if pulse.state is PulseState.ANSWERING else "is gone"
            _logger.warning("%s %s after %.1f s of silence.", address, how, seconds)

    def _pass_on(self) -> None:
        """Tells the process what it does not know yet: whom to watch, and which connections there are."""
        if self._child is None:
            return
        with self._changed:
            watched = dict(self._watched)
        owners = self._lookup.owners(watched)
        found = {each.identity: each for each in self._connections.find(owners)} if owners else {}
        self._child.tell(
            watched,
            {identity: watched[owners[each.peer]] for identity, each in found.items()},
            lambda identity: self._connections.duplicate(found[identity]),
        )
        self._lookup.renew()
