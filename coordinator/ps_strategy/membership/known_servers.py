"""The servers of the cluster: where they are, and which of them answer.

Promises: servers are asked all at once, and asking ends within `Options.probe_timeout`; one that the heartbeat has
found silent is not asked. What is known is replaced as a whole, so that it can be read from any thread without waiting.
"""

import contextlib
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from coordinator.errors import StrategyClosedError
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.task_probe import TaskProbe, TaskStatus
from coordinator.heartbeat.watched_server import ServerState
from coordinator.options import Options
from coordinator.ps_strategy.membership.cluster_definition import Task, check_address

Value = TypeVar("Value")


class KnownServers:
    """Knows, probes and watches the servers of a cluster that may change.

    Args:
      addresses: `host:port` of each server at the beginning.
      options: time limits.

    Attributes:
      addresses: `host:port` of each server now.
    """

    def __init__(self, addresses: Mapping[Task, str], options: Options) -> None:
        self._probe_timeout = options.probe_timeout
        self._heartbeat = Heartbeat(options.heartbeat_interval, options.heartbeat_timeout)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._probes: dict[Task, TaskProbe] = {}
        self.addresses: Mapping[Task, str] = {}
        self._heartbeat.start()
        for task, address in addresses.items():
            self.add(task, address)

    @property
    def workers(self) -> Sequence[Task]:
        """The workers, by index."""
        return sorted(task for task in self.addresses if task.job == "worker")

    def add(self, task: Task, address: str) -> None:
        """Adds a server.

        Raises:
          ValueError: the address is not valid, or another server has it.
          StrategyClosedError: `stop` was called.
        """
        with self._lock:
            if self._is_stopped:
                raise StrategyClosedError(f"{task} cannot be added: the strategy is closed.")
            check_address(task, address, self.addresses)
            self._probes = {**self._probes, task: TaskProbe(address)}
            self.addresses = {**self.addresses, task: address}
        self._heartbeat.watch(address)

    def remove(self, task: Task) -> None:
        """Removes a server, which is no longer probed or watched."""
        with self._lock:
            address, probe = self.addresses[task], self._probes[task]
            self.addresses = without_tasks(self.addresses, [task])
            self._probes = without_tasks(self._probes, [task])
        self._heartbeat.forget(address)
        probe.close()

    def probe(self, tasks: Iterable[Task]) -> dict[Task, TaskStatus]:
        """Asks servers for their status. Returns the answers of those that answer."""
        pending = {}
        for task in tasks:
            address, probe = self.addresses.get(task), self._probes.get(task)
            if address is None or probe is None or self._is_stopped or self._heartbeat.is_silent(address):
                continue
            # The server was removed, or moved, at this very moment.
            with contextlib.suppress(ValueError):
                pending[task] = probe.begin_status(self._probe_timeout)
        statuses = {task: wait() for task, wait in pending.items()}
        return {task: status for task, status in statuses.items() if status is not None}

    def last_state(self, task: Task) -> ServerState | None:
        """Returns what the heartbeat has seen last, without asking; None if there is no such server."""
        address = self.addresses.get(task)
        return None if address is None else self._heartbeat.state(address)

    def was_silent_since(self, task: Task, time: float) -> bool:
        """Returns True if the heartbeat shut down connections to a server later than `time`, or the server is gone.

        Args:
          task: the server.
          time: on the `time.monotonic` clock.
        """
        address = self.addresses.get(task)
        return address is None or self._heartbeat.last_silence(address) > time

    def find_connections(self, addresses: Iterable[str]) -> None:
        """Has the heartbeat look for new connections to servers at once."""
        for address in addresses:
            self._heartbeat.watch(address)

    def stop(self) -> None:
        """Refuses new servers, and probes none from now on. `close` must follow."""
        with self._lock:
            self._is_stopped = True

    def close(self) -> None:
        """Ends the heartbeat and the probes."""
        self._heartbeat.close()
        for probe in self._probes.values():
            probe.close()


def without_tasks(mapping: Mapping[Task, Value], tasks: Collection[Task]) -> dict[Task, Value]:
    """Returns a copy of a mapping that lacks some tasks."""
    return {task: value for task, value in mapping.items() if task not in tasks}
