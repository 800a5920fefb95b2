"""Which servers of the cluster this process is connected to.

    known --answers--> connected --silent, gone, restarted, or lost by a call--> disconnected --answers--> connected

A connection is to one incarnation of a server. It is lost when the server does not answer a probe, answers as another
incarnation, has freed what this client created there, or was silent for so long that the heartbeat shut down the
connections to it; a worker's, too, when the worker does not reach a parameter server. A worker that was lost is
connected again only once it reaches all of them.

One change is made at a time, in bounded time. `_turn` ensures that; servers are asked while it is held, since what they
answer decides the change. So it is never taken together with another lock, nor by a method that only reads or asks, nor
to add a worker: only what changes connections waits for another change.

The servers of a cluster, the connections of this process to them, and how these are changed.

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
import dataclasses
import itertools
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from coordinator.errors import ParameterServerLost, StrategyClosedError
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.heartbeat_process import Liveness
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.probes import Link, ServerLinks, TaskProbe, TaskStatus, find_obstacles
from coordinator.options import Options
from coordinator.ps_strategy.membership.clients import CHILDREN, Client, ClientLease, Goodbye, join_as_client
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges, Connection, plan_change
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, Task, check_address
from coordinator.ps_strategy.membership.handshake import Handshake, SentinelVariables, WorkerDevices, calling_device
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


# While the first connection is awaited, in seconds.
_CONNECT_REPORT_INTERVAL = 5.0


class Membership:
    """Connects this process to the servers of a cluster that may change.

    Args:
      definition: the servers at the beginning. The parameter servers stay; workers come and go.
      client_address: `host:port` of this process's own TensorFlow server.
      options: time limits.
    """

    def __init__(self, definition: ClusterDefinition, client_address: str, options: Options) -> None:
        self._options = options
        self._parameter_servers = definition.tasks("ps")
        self._connections = Connections(definition, client_address, options)
        self._turn = threading.Lock()
        # What each worker's last attempt was begun with; each entry is used by its worker's thread alone.
        self._attempted: dict[int, Connection | None] = {}
        # Why workers that answer count as lost: which link of each is broken.
        self._unlinked: dict[int, str] = {}
        self._has_recovered = self._has_moved = False

    @classmethod
    def connected(cls, definition: ClusterDefinition, options: Options) -> "Membership":
        """Makes this process the client of a cluster, and connects to the servers.

        Raises:
          RuntimeError: this process is connected to a cluster already.
          LaunchError: the address that the specification reserves for the client is in use.
          TimeoutError: the parameter servers, or the first worker, did not answer within `Options.connect_timeout`.
        """
        own_address = join_as_client(definition)
        membership = cls(definition, own_address, options)
        connections = membership._connections
        CHILDREN.keep_from(lambda: [own_address, *connections.addresses.values()])
        try:
            membership.connect()
        except BaseException:
            membership.close()
            raise
        return membership

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """`host:port` of each worker, by index."""
        addresses = self._connections.addresses
        return {task.index: addresses[task] for task in sorted(addresses) if task.job == "worker"}

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The names of the parameter servers, by index."""
        return [task.device for task in self._parameter_servers]

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that compute on each worker, relative to it, such as `/device:GPU:0`."""
        return self._connections.worker_devices.names

    def worker_device(self, worker: int) -> str:
        """Returns the name of a worker, such as `/job:worker/replica:0/task:0`."""
        return _worker(worker).device

    def begin_attempt(self, worker: int) -> Connection | None:
        """Returns the connection to a worker for the caller's next call; None if there is none.

        `is_attempt_lost` and `disconnect` are about this connection, even if the worker is reconnected meanwhile.

        Raises:
          StrategyClosedError: the program has reset TensorFlow.
        """
        connection = self._attempted[worker] = self._connections.present.get(_worker(worker))
        if self._connections.context.is_replaced:
            raise StrategyClosedError(
                "TensorFlow was reset, and with it all that this strategy has on the servers: its variables and "
                "functions. Close the strategy before TensorFlow is reset, and make a new one afterwards."
            )
        return connection

    def present_connection(self, worker: int) -> Connection | None:
        """Returns the connection to a worker now; None if there is none."""
        return self._connections.present.get(_worker(worker))

    def is_attempt_lost(self, worker: int) -> bool:
        """Returns True if the connection of the last attempt was replaced, or the worker is not reachable now."""
        is_replaced = self._attempted.get(worker) != self._connections.present.get(_worker(worker))
        return is_replaced or not self.is_reachable(worker)

    def is_reachable(self, worker: int) -> bool:
        """Returns True if a worker answers a probe now, as the incarnation that this process is connected to."""
        return not self._connections.losses([_worker(worker)])

    def is_parameter_server_reachable(self, index: int) -> bool:
        """Returns True if a parameter server answers a probe now, as the incarnation that holds the variables."""
        return not self._connections.losses([self._parameter_servers[index]])

    def seems_reachable(self, worker: int) -> bool:
        """Returns whether a worker was reachable when the heartbeat last heard from it, without asking."""
        return self._connections.seems_connected(_worker(worker))

    def seem_parameter_servers_reachable(self) -> bool:
        """Returns whether all parameter servers were reachable when the heartbeat last heard from them."""
        return all(map(self._connections.seems_connected, self._parameter_servers))

    @property
    def settled(self) -> threading.Event:
        """See `Connections`."""
        return self._connections.settled

    def lost_parameter_servers(self) -> tuple[str, ...]:
        """Returns the names of the parameter servers that are gone or were restarted."""
        return tuple(map(str, self._connections.losses(self._parameter_servers)))

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """Returns the error that names the first parameter server that is gone or was restarted, if one was."""
        for task, what in self._connections.losses(self._parameter_servers).items():
            return ParameterServerLost(
                str(task),
                f"The parameter server {task} was lost ({self._connections.describe_loss(task, what)}). Start it again "
                "if it is down. Without strategy.restore_from, close this strategy, create a new one, and restore the "
                "latest checkpoint.",
            )
        return None

    def describe_loss(self, worker: int) -> str:
        """Returns the address of a worker that was lost, and what is known of it now; for messages."""
        task = _worker(worker)
        if (why := self._unlinked.get(worker)) is not None:
            return why
        what = self._connections.losses([task]).get(task, "answers again")
        return self._connections.describe_loss(task, what)

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Asks workers whether they reach the parameter servers; see `Servers.broken_links`."""
        addresses = self._connections.addresses
        found = self._connections.unreached([_worker(worker) for worker in workers], self._parameter_servers)
        return {
            source.index: f"{addresses.get(source)} does not reach {target} at {addresses.get(target)}: {words}"
            for (source, target), words in found.items()
        }

    def separation(self) -> str:
        """Asks the parameter servers whether they reach each other; see `Servers.separation`."""
        for (source, target), words in self._connections.unreached(*[self._parameter_servers] * 2).items():
            addresses = self._connections.addresses
            return f"{source} at {addresses[source]} does not reach {target} at {addresses[target]}: {words}"
        return ""

    def give_up(self, worker: int, why: str) -> None:
        """Counts a worker as lost because of a broken link; see `Servers.give_up`."""
        with self._turn:
            if _worker(worker) in self._connections.present:
                self._unlinked[worker] = why
                self._connections.drop(_worker(worker))

    def is_unlinked(self, worker: int) -> bool:
        """Returns whether a worker was given up, and not connected again since."""
        return worker in self._unlinked

    def connect(self) -> None:
        """Connects to all parameter servers and to the workers that answer; at least one must.

        Raises:
          TimeoutError: they did not answer within `Options.connect_timeout`.
          VersionMismatchError: one runs another TensorFlow, and `Options.version_mismatch` does not allow it.
          DeviceMismatchError: workers have different numbers of devices.
        """
        limit = self._options.connect_timeout
        began = reported = time.monotonic()
        deadline = began + limit
        pause = threading.Event()
        while missing := self._connect_once():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(
                    f"No connection within {limit:g} s: {self._name(missing)} did not answer. "
                    f"{self._why_missing(missing)} See also Options.connect_timeout."
                )
            if now - reported > min(_CONNECT_REPORT_INTERVAL, self._options.stall_report_interval):
                reported = now
                text = "Waiting for %s to answer, %.0f s of at most %g s. %s"
                _logger.warning(text, self._name(missing), now - began, limit, self._why_missing(missing))
            pause.wait(min(self._options.reconnect_interval, max(0.0, deadline - time.monotonic())))

    def disconnect(self, worker: int) -> None:
        """Disconnects from a worker that was lost, so that nothing waits for it, unless it was reconnected since."""
        self._disconnect(_worker(worker), self._attempted.get(worker))

    def reconnect(self, worker: int) -> bool:
        """Connects to a worker that was lost, if it answers now. Returns True if it is connected."""
        task = _worker(worker)
        if not self._connections.answering([task]) or self.lost_parameter_server() is not None:
            return False
        if why := self.broken_links([worker]).get(worker):
            self._unlinked[worker] = why
            return False
        with self._turn:
            # The return of another worker may have reconnected this one too.
            is_known = task in self._connections.addresses and not self._connections.is_closing
            if is_known and not self.is_reachable(worker):
                self._connections.replace([task])
        if self._has_recovered:
            self.reach_parameter_servers([task])
        if is_connected := self.is_reachable(worker):
            self._unlinked.pop(worker, None)
        return is_connected

    def reconnect_parameter_servers(self) -> bool:
        """Connects to all parameter servers that were lost, if each of them answers now; their variables are gone.

        Workers that answer stay connected.

        Returns:
          False if a parameter server does not answer, or dies meanwhile.
        """
        if len(self._connections.answering(self._parameter_servers)) < len(self._parameter_servers):
            return False
        with self._turn:
            lost = self._connections.losses(self._parameter_servers)
            if lost and not self._connections.is_closing:
                is_changed = self._reconnect_all() if self._has_moved else self._connections.replace(lost)
                self._has_recovered = is_changed or self._has_recovered
        return not self._connections.losses(self._parameter_servers)

    def reach_parameter_servers(self, workers: Collection[Task] | None = None) -> None:
        """Has workers, or all servers if None, reach the parameter servers; disconnects workers that cannot.

        To be called after a recovery; see `Connections.reach_parameter_servers`.
        """
        for task, connection in self._connections.reach_parameter_servers(workers).items():
            _logger.warning("%s does not reach all parameter servers; it is reconnected.", task)
            self._disconnect(task, connection)

    def add_worker(self, worker: int, address: str) -> None:
        """Adds a worker; `reconnect` connects to it.

        Raises:
          ValueError: the address is not valid, or a server of the cluster has it.
        """
        self._connections.add(_worker(worker), address)

    def move_worker(self, worker: int, address: str) -> None:
        """Changes the address of a worker. What it runs fails, and `reconnect` connects to it at the new address.

        Raises:
          ValueError: the address is not valid, or another server has it.
        """
        with self._turn:
            task = _worker(worker)
            check_address(task, address, self._connections.addresses)
            self._drop_task(task)
            self._connections.add(task, address)

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, which counts as lost; it is reconnected there.

        Raises:
          ValueError: the address is not valid, or another server has it.
        """
        with self._turn:
            task = self._parameter_servers[index]
            former = self._connections.addresses[task]
            self._connections.move(task, address)
            self._has_moved = True
            # Calls to a server that does not end them would last for ever: the heartbeat no longer watches it.
            OpenConnections().shut_down(former)

    def remove_worker(self, worker: int) -> None:
        """Removes a worker; what it runs fails."""
        with self._turn:
            self._drop_task(_worker(worker))

    def close(self) -> None:
        """Disconnects from every server, which frees what this client created there."""
        if self._turn.acquire(timeout=self._connections.begin_close()):
            try:
                self._connections.change(without=self._connections.present)
            finally:
                self._turn.release()
        else:
            _logger.warning("A server that does not answer holds up a change of the cluster; closing does not wait.")
        self._connections.close()

    def __repr__(self) -> str:
        return f"<Membership: connected to {', '.join(map(str, sorted(self._connections.present)))}>"

    def _connect_once(self) -> list[Task]:
        """Connects to the servers that answer. Returns the servers that are awaited: all workers, or none of them."""
        servers = self._connections.addresses
        missing = self._missing(self._connections.answering(servers))
        if missing:
            return missing
        # There are no variables yet: a parameter server that was restarted meanwhile is as good as before.
        with self._turn:
            self._connections.change(without=self._connections.present, adding=servers)
        self._connections.raise_refusal()
        present = self._connections.present
        return self._missing(present.keys() - self._connections.losses(present))

    def _missing(self, answering: Collection[Task]) -> list[Task]:
        has_worker = any(task.job == "worker" for task in answering)
        needed = self._parameter_servers if has_worker else sorted(self._connections.addresses)
        return [task for task in needed if task not in answering]

    def _why_missing(self, missing: Sequence[Task]) -> str:
        return self._connections.last_error or self._connections.describe_obstacles(missing)

    def _name(self, missing: Sequence[Task]) -> str:
        addresses = self._connections.addresses
        names = [f"{task} ({addresses[task]})" for task in missing if task.job == "ps"]
        if workers := [addresses[task] for task in missing if task.job == "worker"]:
            names.append(f"any worker ({shortened(workers)})")
        return ", ".join(names)

    def _reconnect_all(self) -> bool:
        """Disconnects from all servers, which would keep the former address of another one, and connects to them."""
        self._connections.change(without=self._connections.present)
        is_changed = self._connections.change(adding=self._connections.addresses)
        self._has_moved = not is_changed
        return is_changed

    def _disconnect(self, task: Task, lost: Connection | None) -> None:
        with self._turn:
            present = self._connections.present
            is_known = task in present or self._connections.is_in_server_def(task)
            if is_known and (present.get(task) == lost or self._connections.losses([task])):
                self._connections.change(without=[task])

    def _drop_task(self, task: Task) -> None:
        """Removes a worker; called by the thread that has the turn."""
        address = self._connections.addresses[task]
        self._connections.change(without=[task])
        # A call that the server does not end would last for ever: the heartbeat no longer watches it.
        OpenConnections().shut_down(address)
        self._connections.remove(task)


def _worker(index: int) -> Task:
    return Task("worker", index)


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """A task that holds variables.

    Attributes:
      index: its task index.
      device: its name, such as `/job:ps/replica:0/task:0`.
    """

    index: int
    device: str
    membership: Membership = dataclasses.field(repr=False)

    def healthy(self) -> bool:
        """Returns whether it answers a probe and still holds our variables."""
        return self.membership.is_parameter_server_reachable(self.index)
