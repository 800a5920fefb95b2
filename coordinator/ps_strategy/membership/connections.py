"""The servers of a cluster, the connections of this process to them, and how these are changed.

    plan (`plan_change`, pure) --> update TensorFlow's server definition (`ClusterChanges`) --> admit the servers
                                                                          (`Handshake`, `SentinelVariables`)

Each step asks all servers in parallel, and ends in bounded time: probes within `Options.probe_timeout`; a server that
the heartbeat has found silent is not asked. A change keeps to these rules:

- Only servers that answer are in the server definition. One that dies meanwhile makes the update fail.
- All parameter servers are in it, or no server is: one that joins later may stay unknown to the others.
- It is left alone while a parameter server is out of TensorFlow's own reach, which would cost that server's variables.
  After each update a sentinel shows whether the variables still exist.
- A lost worker leaves it before it is connected again, even if the same process answers: it lacks the functions that
  were registered meanwhile.
"""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from coordinator.errors import StrategyClosedError
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.obstacle import find_obstacles
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.server_links import Link, ServerLinks
from coordinator.heartbeat.task_probe import TaskProbe, TaskStatus
from coordinator.heartbeat.watched_server import Liveness
from coordinator.options import Options
from coordinator.ps_strategy.membership.client_registry import Client
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges, Connection, plan_change
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, Task, check_address
from coordinator.ps_strategy.membership.goodbye import Goodbye
from coordinator.ps_strategy.membership.handshake import Handshake
from coordinator.ps_strategy.membership.remote_context import ClientLease
from coordinator.ps_strategy.membership.sentinel_variable import SentinelVariables
from coordinator.ps_strategy.membership.worker_devices import WorkerDevices, calling_device
from coordinator.ps_strategy.tensorflow_internals.process import PresentContext, context_id

Value = TypeVar("Value")

_logger = logging.getLogger("coordinator")

# What happened to a server, for messages.
_GONE = "does not answer"
_RESTARTED = "was restarted, or not heard from for long, and lost what this program had there"
# The longest list of servers in a message.
_MOST_NAMES = 4


class Connections:
    """Connects to servers and disconnects from them. One thread at a time may change a connection.

    Any thread may add a server, ask, or read: what is known is replaced as a whole.

    Args:
      definition: the cluster at the beginning.
      client_address: `host:port` of this process's own TensorFlow server.
      options: time limits.

    Attributes:
      addresses: `host:port` of each server of the cluster now.
      present: the connections, whether their servers still answer or not.
      last_error: that the last change failed, as a sentence for users; empty if it did not.
      is_closing: whether servers are no longer added, asked or connected to.
      settled: set unless the server definition is being updated, which may cost servers their variables; whether it
        did is known afterwards.
      context: TensorFlow's, to which all connections belong.
    """

    def __init__(self, definition: ClusterDefinition, client_address: str, options: Options) -> None:
        self._parameter_servers = definition.tasks("ps")
        self._probe_timeout = options.probe_timeout
        self.context = PresentContext()
        client = Client(context_id(), client_address, socket.gethostname())
        self._handshake = Handshake(client, options)
        self._goodbye = Goodbye(client.context_id, options.probe_timeout)
        self._sentinels = SentinelVariables(max(10.0, 2 * options.heartbeat_timeout))
        self._numbers = itertools.count()
        # Guards the next three while one of them is changed.
        self._lock = threading.Lock()
        self._probes: dict[Task, TaskProbe] = {}
        self.addresses: Mapping[Task, str] = {}
        self.is_closing = False
        self.present: dict[Task, Connection] = {}
        self.last_error = ""
        self.settled = threading.Event()
        self.settled.set()
        timeouts = options.client_timeout, options.heartbeat_timeout
        with contextlib.ExitStack() as opened:
            self._changes = ClusterChanges(definition.protocol, client_address, *timeouts)
            opened.callback(self._changes.close)
            self._lease = ClientLease(client.context_id, options)
            opened.callback(self._lease.close)
            self._heartbeat = Heartbeat(options.heartbeat_interval, options.heartbeat_timeout)
            opened.callback(self._heartbeat.close)
            self._links = ServerLinks(options.heartbeat_timeout)
            opened.callback(self._links.close)
            for task, address in definition.addresses.items():
                self.add(task, address)
            opened.pop_all()

    def add(self, task: Task, address: str) -> None:
        """Adds a server, without connecting to it.

        Raises:
          ValueError: the address is not valid, or another server has it.
          StrategyClosedError: `begin_close` was called.
        """
        with self._lock:
            self._set_address(task, address, "added")
        self._heartbeat.watch(address)

    def move(self, task: Task, address: str) -> None:
        """Changes the address of a server, which counts as lost until it is connected at the new one.

        Raises:
          ValueError: the address is not valid, or another server has it.
          StrategyClosedError: `begin_close` was called.
        """
        with self._lock:
            former, probe = self.addresses[task], self._probes[task]
            self._set_address(task, address, "moved")
        self._heartbeat.forget(former)
        self._heartbeat.watch(address)
        probe.close()

    def _set_address(self, task: Task, address: str, verb: str) -> None:
        """Checks and sets the address of a server; the lock is held."""
        if self.is_closing:
            raise StrategyClosedError(f"{task} cannot be {verb}: the strategy is closed.")
        check_address(task, address, self.addresses)
        self._probes = {**self._probes, task: TaskProbe(address)}
        self.addresses = {**self.addresses, task: address}

    def remove(self, task: Task) -> None:
        """Removes a server that is not connected; it is no longer probed or watched."""
        with self._lock:
            address, probe = self.addresses[task], self._probes[task]
            self.addresses = _without(self.addresses, [task])
            self._probes = _without(self._probes, [task])
        self._heartbeat.forget(address)
        probe.close()

    def seems_connected(self, task: Task) -> bool:
        """Returns whether a server was connected when the heartbeat last heard from it, without asking."""
        connection, address = self.present.get(task), self.addresses.get(task)
        if connection is None or address is None or self._is_stale(task, address, connection):
            return False
        state = self._heartbeat.state(address)
        if state.liveness is Liveness.ANSWERING:
            return state.incarnation == connection.incarnation
        return state.liveness is Liveness.UNKNOWN

    def losses(self, tasks: Collection[Task]) -> dict[Task, str]:
        """Asks servers, and returns those that are not connected now, with words on what happened."""
        return self._losses(tasks, self.present, self._probe(tasks))

    def unreached(self, sources: Collection[Task], targets: Collection[Task]) -> dict[tuple[Task, Task], str]:
        """Asks servers whether they reach others, all at once.

        Args:
          sources: the servers that are asked. Those that do not answer the client are left out.
          targets: the servers that the sources are to reach.

        Returns:
          The pairs of a source and a target that the source does not reach, each with words on why.
        """
        addresses = self.addresses
        answering = {task: addresses[task] for task in {*sources, *targets} if self._answers(task)}
        pairs = {
            Link(answering[source], answering[target]): (source, target)
            for source in answering.keys() & set(sources)
            for target in answering.keys() & set(targets)
            if source != target
        }
        broken = {pairs[link]: words for link, words in self._links.broken(pairs).items()}
        # One that has died meanwhile is lost itself.
        alive = self._probe({task for pair in broken for task in pair})
        return {pair: words for pair, words in broken.items() if all(task in alive for task in pair)}

    def _answers(self, task: Task) -> bool:
        address = self.addresses.get(task)
        return address is not None and self._heartbeat.state(address).liveness is Liveness.ANSWERING

    def drop(self, task: Task) -> None:
        """Counts a server as lost although it answers, and ends the calls to it."""
        self.present = _without(self.present, [task])
        if (address := self.addresses.get(task)) is not None:
            OpenConnections().shut_down(address)

    def describe_loss(self, task: Task, what: str) -> str:
        """Returns the address of a server and words on its loss, for messages.

        Args:
          task: the server.
          what: the words that `losses` returned for it.
        """
        address = self.addresses.get(task)
        if address is None:
            return "it was removed"
        if what == _GONE:
            obstacle = self._heartbeat.state(address).obstacle or find_obstacles([address])[address]
            what = f"{_GONE}: {obstacle.value}"
        return f"{address} {what}"

    def describe_obstacles(self, tasks: Iterable[Task]) -> str:
        """Connects to servers that do not answer, and returns a sentence on what that shows."""
        addresses = [self.addresses[task] for task in tasks if task in self.addresses]
        found: dict[str, list[str]] = {}
        for address, obstacle in find_obstacles(addresses).items():
            found.setdefault(obstacle.value, []).append(address)
        return "; ".join(f"{shortened(of_one)}: {words}" for words, of_one in found.items()) + "."

    def answering(self, tasks: Iterable[Task]) -> set[Task]:
        """Asks servers, and returns those that answer and may take part."""
        refused = self._handshake.refused
        return {task for task, status in self._probe(tasks).items() if status.incarnation not in refused}

    def raise_refusal(self) -> None:
        """Raises why a server was refused, if one was: `VersionMismatchError` or `DeviceMismatchError`."""
        for error in self._handshake.refused.values():
            raise error

    @property
    def worker_devices(self) -> WorkerDevices:
        """The devices of each worker; known once one has answered."""
        assert self._handshake.devices is not None
        return self._handshake.devices

    def is_in_server_def(self, task: Task) -> bool:
        """Returns True if TensorFlow may be connected to a server, which may be lost."""
        return task in self._changes.addresses

    def change(self, without: Collection[Task] = (), adding: Collection[Task] = ()) -> bool:
        """Changes which servers this process is connected to.

        Args:
          without: to be disconnected from.
          adding: to be connected to besides the present ones, if they answer.

        Returns:
          True if TensorFlow's server definition was updated. If not, no connection is new, and lost ones are dropped.
        """
        self.present = present = _without(self.present, without)
        statuses = self._probe({*present, *adding})
        self._handshake.check_devices(statuses, self.addresses)
        lost = self._losses([task for task in present if task.job == "ps"], present, statuses)
        answering = {
            task: status.incarnation
            for task, status in statuses.items()
            if task not in lost and status.incarnation not in self._handshake.refused
        }
        plan = plan_change(present, adding, answering, self._parameter_servers)
        if plan is None or self.context.is_replaced:
            return False
        kept, incarnations = plan
        numbers = [connection.number for task, connection in kept.items() if task.job == "ps"]
        if not self._sentinels.are_reachable(numbers):
            return False
        now = time.monotonic()
        new = {
            task: Connection(incarnation, next(self._numbers), now, calling_device(statuses[task].devices))
            for task, incarnation in incarnations.items()
        }
        addresses = {task: self.addresses[task] for task in sorted({*kept, *new})}
        self.present = kept
        self.settled.clear()
        try:
            is_updated = self._apply_server_def(addresses)
            # Workers too: what each has a copy of, such as copies of data, may be gone.
            gone = self._sentinels.gone([each.number for each in kept.values()])
            self.present = kept = {task: each for task, each in kept.items() if each.number not in gone}
        finally:
            self.settled.set()
        if is_updated:
            admitted = {**kept, **self._handshake.admit(new, addresses)}
            self._lease.hold([addresses[task] for task in admitted])
            self._goodbye.addresses.update(addresses[task] for task in admitted)
            devices = {each.number: task.device for task, each in admitted.items()}
            unplaced = self._sentinels.place(devices)
            self.present = {task: each for task, each in admitted.items() if each.number not in unplaced}
        return is_updated

    def replace(self, lost: Collection[Task]) -> bool:
        """Makes new connections to servers that were lost. Returns True if it could be tried."""
        must_leave = any(task.job == "worker" and self.is_in_server_def(task) for task in lost)
        self.present = _without(self.present, lost)
        return (not must_leave or self.change()) and self.change(adding=lost)

    def reach_parameter_servers(self, workers: Collection[Task] | None) -> dict[Task, Connection]:
        """Has workers, or all servers if None, reach the parameter servers. Returns the workers that cannot.

        Calls from a server that has not reached a recovered one yet would fail halfway, with a part of their effect.
        """
        present = self.present
        if not present.keys() >= set(self._parameter_servers):
            return {}
        numbers = [present[task].number for task in self._parameter_servers]
        if workers is None and not self._sentinels.reach_each_other(numbers):
            _logger.warning("The parameter servers do not all reach each other yet; functions may run twice.")
        asked = [task for task in present if task.job == "worker" and (workers is None or task in workers)]
        return {task: present[task] for task in self._sentinels.unreached_from(asked, numbers)}

    def begin_close(self) -> float:
        """Refuses new servers, asks none from now on, and shortens changes, one in progress too. `close` must follow.

        Returns:
          The longest that a change may take now, in seconds.
        """
        self._goodbye.strategy_closes()
        with self._lock:
            self.is_closing = True
        # Ends the waits for answers.
        self._links.close()
        return self._changes.hurry()

    def close(self) -> None:
        """Ends threads and probes, and undoes the patches of TensorFlow, without changing anything on the servers."""
        self._changes.close()
        self._lease.close()
        self._heartbeat.close()
        self._links.close()
        for probe in self._probes.values():
            probe.close()

    def _probe(self, tasks: Iterable[Task]) -> dict[Task, TaskStatus]:
        """Asks servers for their status, all at once. Returns the answers of those that answer."""
        pending = {}
        for task in tasks:
            address, probe = self.addresses.get(task), self._probes.get(task)
            if address is None or probe is None or self.is_closing:
                continue
            if self._heartbeat.state(address).liveness is Liveness.SILENT:
                continue
            # The server was removed, or moved, at this very moment.
            with contextlib.suppress(ValueError):
                pending[task] = probe.begin_status(self._probe_timeout)
        statuses = {task: wait() for task, wait in pending.items()}
        return {task: status for task, status in statuses.items() if status is not None}

    def _losses(
        self, tasks: Collection[Task], present: Mapping[Task, Connection], statuses: Mapping[Task, TaskStatus]
    ) -> dict[Task, str]:
        addresses = self.addresses
        same = {
            task: addresses[task]
            for task in tasks
            if task in statuses
            and task in present
            and task in addresses
            and statuses[task].incarnation == present[task].incarnation
            and not self._is_stale(task, addresses[task], present[task])
        }
        freed = self._lease.freed(same.values())
        return {
            task: _RESTARTED if task in statuses else _GONE for task in tasks if task not in same or same[task] in freed
        }

    def _is_stale(self, task: Task, address: str, connection: Connection) -> bool:
        """Returns True if a worker was silent since it was connected."""
        return task.job == "worker" and self._heartbeat.state(address).last_silence > connection.since

    def _apply_server_def(self, addresses: Mapping[Task, str]) -> bool:
        """Updates TensorFlow's server definition. Returns False if it failed, and a later attempt may succeed."""
        try:
            self._changes.apply(addresses)
        except tf.errors.OpError as error:
            _logger.info("Connecting to %s failed; it is tried again.", ", ".join(map(str, addresses)))
            _logger.debug("TensorFlow's message about it:", exc_info=error)
            self.last_error = (
                f"Those that answer could not be connected to ({type(error).__name__}; TensorFlow's own message is "
                f"logged at the level DEBUG). Do they run the same TensorFlow as this program, {tf.version.VERSION}?"
            )
            return False
        self.last_error = ""
        # The heartbeat looks for the new connections at once.
        for address in addresses.values():
            self._heartbeat.watch(address)
        return True


def shortened(names: Sequence[str]) -> str:
    """Returns a list of names, of which it has only the first few if there are many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _without(mapping: Mapping[Task, Value], tasks: Collection[Task]) -> dict[Task, Value]:
    return {task: value for task, value in mapping.items() if task not in tasks}
