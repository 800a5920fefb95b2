"""The connections of this process to servers, and the changes of these connections.

    known --answers--> connected --silent, gone, restarted, or lost by a call--> disconnected --answers--> connected

    plan (`plan_change`, pure) --> update TensorFlow's server definition (`ClusterChanges`) --> admit the servers
                                                                          (`Handshake`, `SentinelVariables`)

A connection is to one incarnation of a server. The connection is lost when the server does not answer a probe, answers
as another incarnation, has freed this client's objects, or was silent so long that the heartbeat shut down its
connections. A worker's connection is also lost when the worker does not reach a parameter server; such a worker is
connected again only once it reaches all parameter servers.

Each step of a change asks all servers in parallel and ends in bounded time: a probe takes at most
`Options.probe_timeout`, and a server that the heartbeat has found silent is not asked. Every change keeps these rules:

- Only servers that answer are in the server definition. A server that dies during the update makes the update fail.
- The server definition has all parameter servers or no server: a server that joins later may stay unknown to the rest.
- The server definition is not changed while TensorFlow does not reach a parameter server: the change would destroy that
  server's variables. After each update a sentinel shows whether the variables still exist.
- A lost worker leaves the server definition before it is connected again, even if the same process answers: the worker
  lacks the functions that were registered in between.
"""

import contextlib
import dataclasses
import functools
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
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS, ClusterDefinition, Task, check_address
from coordinator.ps_strategy.membership.handshake import Handshake, SentinelVariables, calling_device
from coordinator.ps_strategy.tensorflow_internals.functions import PresentContext
from coordinator.ps_strategy.tensorflow_internals.process import context_id

Value = TypeVar("Value")

_logger = logging.getLogger("coordinator")

_GONE = "does not answer"
_RESTARTED = "was restarted, or not heard from for long, and lost what this program had there"
# The most names of servers in a message.
_MOST_NAMES = 4
# The interval of log messages during the wait for the first connection, in seconds.
_CONNECT_REPORT_INTERVAL = 5.0


class Membership:
    """The connections of this process to the servers of a cluster that may change: `coordinator.runtime.Servers`.

    Any thread may call every method. One change of the connections is made at a time. The lock `_turn` is held during a
    change, including requests to servers whose answers decide the change. So no thread takes `_turn` while it holds
    another lock. Methods that only read, only ask servers, or add a worker do not take `_turn`. Reading needs no lock:
    a dictionary is replaced as a whole. `client_address` is `host:port` of this process's own TensorFlow server.

    Attributes:
      settled: cleared during an update of the server definition, which can destroy variables. Check after the update.
    """

    def __init__(self, definition: ClusterDefinition, client_address: str, options: Options) -> None:
        self._options = options
        self._parameter_servers = definition.tasks("ps")
        self._context = PresentContext()
        client = Client(context_id(), client_address, socket.gethostname())
        self._handshake = Handshake(client, options)
        self._goodbye = Goodbye(client.context_id, options.probe_timeout)
        self._sentinels = SentinelVariables(max(10.0, 2 * options.heartbeat_timeout))
        self._numbers = itertools.count()
        # `_lock` is held to change `_probes`, `_addresses` or `_is_closing`.
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._probes: dict[Task, TaskProbe] = {}
        self._addresses: Mapping[Task, str] = {}
        self._is_closing = self._has_recovered = self._has_moved = False
        # The connections, including connections to servers that no longer answer. Changed only with `_turn` held.
        self._present: dict[Task, Connection] = {}
        # The connection of each worker's last attempt. Only the worker's thread uses the worker's entry.
        self._attempted: dict[int, Connection | None] = {}
        # By worker that answers but counts as lost: a description of the broken link.
        self._unlinked: dict[int, str] = {}
        # Message for users if the last change failed, else "".
        self._last_error = ""
        self.settled = threading.Event()
        self.settled.set()
        timeouts = options.client_timeout, options.heartbeat_timeout
        changes = ClusterChanges(definition.protocol, client_address, *timeouts)
        with contextlib.ExitStack() as opened:
            self._changes = opened.enter_context(contextlib.closing(changes))
            self._lease = opened.enter_context(contextlib.closing(ClientLease(client.context_id, options)))
            heartbeat = Heartbeat(options.heartbeat_interval, options.heartbeat_timeout)
            self._heartbeat = opened.enter_context(contextlib.closing(heartbeat))
            self._links = opened.enter_context(contextlib.closing(ServerLinks(options.heartbeat_timeout)))
            for task, address in definition.addresses.items():
                self._add(task, address)
            opened.pop_all()

    @classmethod
    def connected(cls, definition: ClusterDefinition, options: Options) -> "Membership":
        """Makes this process the client of a cluster, and connects to the servers.

        Raises the errors of `join_as_client` and `connect`. Call `wait_disconnected` before.
        """
        own_address = join_as_client(definition)
        membership = cls(definition, own_address, options)
        CHILDREN.keep_from(lambda: [own_address, *membership._addresses.values()])
        try:
            membership.connect()
        except BaseException:
            membership.close()
            raise
        return membership

    @staticmethod
    def wait_disconnected(timeout: float) -> None:
        """Waits until this process is disconnected from the servers of a strategy that was closed.

        The environment must not change before: TensorFlow reads it with each remote call, on threads of C++, and the
        process may die if a variable is added during a call. Raises RuntimeError after `timeout` seconds.
        """
        if not ClusterChanges.wait_ended(timeout):
            raise RuntimeError(
                "This process is still connected to the servers of its last strategy, because a change of the cluster "
                "has not ended. Usual cause: a generator of tf.data.Dataset.from_generator that waits. Let it end, and "
                "make the strategy then."
            )

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """`host:port` of each worker, by index."""
        addresses = self._addresses
        return {task.index: addresses[task] for task in sorted(addresses) if task.job == "worker"}

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The names of the parameter servers, by index."""
        return [task.device for task in self._parameter_servers]

    @property
    def parameter_server_connections(self) -> tuple[int, ...]:
        """The numbers of the present connections to parameter servers; while they are the same, variables exist."""
        present = self._present
        return tuple(present[task].number for task in self._parameter_servers if task in present)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The computing devices of each worker, such as `/device:GPU:0`; known once a worker has answered."""
        assert self._handshake.devices is not None
        return self._handshake.devices.names

    def worker_device(self, worker: int) -> str:
        """Returns the name of a worker, such as `/job:worker/replica:0/task:0`."""
        return _worker(worker).device

    def begin_attempt(self, worker: int) -> Connection | None:
        """Returns the connection for the caller's next call to a worker; None if the worker is not connected.

        `is_attempt_lost` and `disconnect` refer to this connection, even after the worker was reconnected. Raises
        StrategyClosedError if the program has reset TensorFlow.
        """
        connection = self._attempted[worker] = self._present.get(_worker(worker))
        if self._context.is_replaced:
            raise StrategyClosedError(
                "TensorFlow was reset, and with it all that this strategy has on the servers: its variables and "
                "functions. Close the strategy before TensorFlow is reset, and make a new one afterwards."
            )
        return connection

    def present_connection(self, worker: int) -> Connection | None:
        return self._present.get(_worker(worker))

    def is_attempt_lost(self, worker: int) -> bool:
        """Returns True if the connection of the last attempt was replaced, or the worker is not reachable now."""
        return self._attempted.get(worker) != self.present_connection(worker) or not self.is_reachable(worker)

    def is_reachable(self, worker: int) -> bool:
        """Returns True if a worker answers a probe now, as the incarnation that this process is connected to."""
        return not self._losses([_worker(worker)])

    def is_parameter_server_reachable(self, index: int) -> bool:
        """Returns True if a parameter server answers a probe now, as the incarnation that holds the variables."""
        return not self._losses([self._parameter_servers[index]])

    def seems_reachable(self, worker: int) -> bool:
        """Returns whether a worker is reachable according to the heartbeat. Sends no probe."""
        return self._seems_connected(_worker(worker))

    def seem_parameter_servers_reachable(self) -> bool:
        """Returns whether all parameter servers are reachable according to the heartbeat. Sends no probe."""
        return all(map(self._seems_connected, self._parameter_servers))

    def lost_parameter_servers(self) -> tuple[str, ...]:
        """Probes the parameter servers; returns the names of the servers that are gone or were restarted."""
        return tuple(map(str, self._losses(self._parameter_servers)))

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """Probes the parameter servers; returns an error that names the first lost server, or None."""
        for task, what in self._losses(self._parameter_servers).items():
            return ParameterServerLost(
                str(task),
                f"The parameter server {task} was lost ({self._describe(task, what)}). Start it again if it is down. "
                "Without strategy.restore_from, close this strategy, create a new one, and restore the latest "
                "checkpoint.",
            )
        return None

    def describe_loss(self, worker: int) -> str:
        """Returns the address of a lost worker and its present state; for messages."""
        task = _worker(worker)
        if (why := self._unlinked.get(worker)) is not None:
            return why
        return self._describe(task, self._losses([task]).get(task, "answers again"))

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Asks workers whether they reach the parameter servers; see `Servers.broken_links`."""
        broken = self._broken_links([_worker(worker) for worker in workers], self._parameter_servers)
        return {source.index: words for source, words in broken}

    def separation(self) -> str:
        """Asks the parameter servers whether they reach each other; see `Servers.separation`."""
        for source, words in self._broken_links(self._parameter_servers, self._parameter_servers):
            return f"{source} at {words}"
        return ""

    def give_up(self, worker: int, why: str) -> None:
        """Counts a worker as lost because of a broken link, and ends the calls to it; see `Servers.give_up`."""
        task = _worker(worker)
        with self._turn:
            if task in self._present:
                self._unlinked[worker] = why
                self._present = _without(self._present, [task])
                if (address := self._addresses.get(task)) is not None:
                    OpenConnections().shut_down(address)

    def is_unlinked(self, worker: int) -> bool:
        """Returns whether a worker was given up, and was not connected again."""
        return worker in self._unlinked

    def connect(self) -> None:
        """Connects to all parameter servers and to the workers that answer; at least one worker must answer.

        Raises:
          TimeoutError: the servers did not answer within `Options.connect_timeout`.
          VersionMismatchError: a server runs another TensorFlow, and `Options.version_mismatch` does not allow it.
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
        """Disconnects from a lost worker, unless it was reconnected in between. This ends waits for the worker."""
        self._disconnect(_worker(worker), self._attempted.get(worker))

    def reconnect(self, worker: int) -> bool:
        """Connects to a lost worker if it answers now. Returns True if the worker is connected."""
        task = _worker(worker)
        if not self._answering([task]) or self.lost_parameter_server() is not None:
            return False
        if why := self.broken_links([worker]).get(worker):
            self._unlinked[worker] = why
            return False
        with self._turn:
            is_known = task in self._addresses and not self._is_closing
            # The return of another worker may have reconnected this worker too.
            if is_known and not self.is_reachable(worker):
                self._replace([task])
        if self._has_recovered:
            self.reach_parameter_servers([task])
        if is_connected := self.is_reachable(worker):
            self._unlinked.pop(worker, None)
        return is_connected

    def reconnect_parameter_servers(self) -> bool:
        """Connects to all lost parameter servers, if each of them answers now; their variables are gone.

        Workers that answer stay connected. Returns False if a parameter server does not answer, or dies in between.
        """
        if len(self._answering(self._parameter_servers)) < len(self._parameter_servers):
            return False
        with self._turn:
            statuses = self._probe(self._parameter_servers)
            if len(statuses) < len(self._parameter_servers):
                # One that does not answer this time is slow: it may still have its variables.
                return False
            lost = self._losses(self._parameter_servers, statuses)
            if lost and not self._is_closing:
                if self._has_moved:
                    # Disconnects from all servers, which otherwise keep the former address of a moved server.
                    self._change(without=self._present)
                    is_changed = self._change(adding=self._addresses)
                    self._has_moved = not is_changed
                else:
                    is_changed = self._replace(lost)
                self._has_recovered = is_changed or self._has_recovered
        return not self._losses(self._parameter_servers)

    def reach_parameter_servers(self, workers: Collection[Task] | None = None) -> None:
        """Makes workers, or all servers if None, connect to the parameter servers; disconnects workers that fail.

        Call this after a recovery: functions on a server that has not reached a recovered parameter server yet would
        fail halfway, with part of their effect.
        """
        present = self._present
        if not present.keys() >= set(self._parameter_servers):
            return
        numbers = [present[task].number for task in self._parameter_servers]
        if workers is None and not self._sentinels.reach_each_other(numbers):
            _logger.warning("The parameter servers do not all reach each other yet; functions may run twice.")
        asked = [task for task in present if task.job == "worker" and (workers is None or task in workers)]
        for task in self._sentinels.unreached_from(asked, numbers):
            _logger.warning("%s does not reach all parameter servers; it is reconnected.", task)
            self._disconnect(task, present[task])

    def add_worker(self, worker: int, address: str) -> None:
        """Adds a worker; `reconnect` connects to it.

        Raises ValueError if the address is invalid or another server's, and StrategyClosedError after `close`.
        """
        self._add(_worker(worker), address)

    def move_worker(self, worker: int, address: str) -> None:
        """Changes the address of a worker. The worker's calls fail, and `reconnect` connects to the new address."""
        with self._turn:
            task = _worker(worker)
            check_address(task, address, self._addresses)
            self._drop_worker(task)
            self._add(task, address)

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, which counts as lost until it is connected at the new address."""
        with self._turn:
            task = self._parameter_servers[index]
            with self._lock:
                former, probe = self._addresses[task], self._probes[task]
                self._set_address(task, address, "moved")
            self._heartbeat.forget(former)
            self._heartbeat.watch(address)
            probe.close()
            self._has_moved = True
            # The heartbeat no longer watches the former address: a call that its server does not end would never end.
            OpenConnections().shut_down(former)

    def remove_worker(self, worker: int) -> None:
        """Removes a worker; its calls fail."""
        with self._turn:
            self._drop_worker(_worker(worker))

    def close(self) -> None:
        """Disconnects from every server, which frees this client's objects there; ends threads and probes."""
        self._goodbye.strategy_closes()
        with self._lock:
            self._is_closing = True
        # Ends waits of `broken_links` and `separation` for answers.
        self._links.close()
        is_left = False
        if self._turn.acquire(timeout=self._changes.hurry()):
            try:
                is_left = self._change(without=self._present)
            finally:
                self._turn.release()
        else:
            _logger.warning("A server that does not answer holds up a change of the cluster; closing does not wait.")
        if not is_left and not self._context.is_replaced:
            self._changes.leave()
        self._changes.close()
        self._lease.close()
        self._heartbeat.close()
        for probe in self._probes.values():
            probe.close()

    def __repr__(self) -> str:
        return f"<Membership: connected to {', '.join(map(str, sorted(self._present)))}>"

    def _add(self, task: Task, address: str) -> None:
        with self._lock:
            self._set_address(task, address, "added")
        self._heartbeat.watch(address)

    def _set_address(self, task: Task, address: str, verb: str) -> None:
        """Checks and sets the address of a server; the caller holds `_lock`."""
        if self._is_closing:
            raise StrategyClosedError(f"{task} cannot be {verb}: the strategy is closed.")
        check_address(task, address, self._addresses)
        self._probes = {**self._probes, task: TaskProbe(address)}
        self._addresses = {**self._addresses, task: address}

    def _drop_worker(self, task: Task) -> None:
        """Disconnects from a worker and forgets it; the caller holds `_turn`."""
        address = self._addresses[task]
        self._change(without=[task])
        # The heartbeat no longer watches the address: a call that the server does not end would never end.
        OpenConnections().shut_down(address)
        with self._lock:
            probe = self._probes[task]
            self._addresses = _without(self._addresses, [task])
            self._probes = _without(self._probes, [task])
        self._heartbeat.forget(address)
        probe.close()

    def _probe(self, tasks: Iterable[Task]) -> dict[Task, TaskStatus]:
        """Asks servers in parallel for their status. Returns the answers by server."""
        pending = {}
        for task in tasks:
            address, probe = self._addresses.get(task), self._probes.get(task)
            if address is None or probe is None or self._is_closing:
                continue
            if self._heartbeat.state(address).liveness is Liveness.SILENT:
                continue
            pending[task] = probe.begin_status(self._options.probe_timeout)
        statuses: dict[Task, TaskStatus] = {}
        for task, wait in pending.items():
            # ValueError: another thread has removed or moved the server and closed its probe.
            with contextlib.suppress(ValueError):
                if (status := wait()) is not None:
                    statuses[task] = status
        return statuses

    def _answering(self, tasks: Iterable[Task]) -> set[Task]:
        """Returns the servers that answer now and are not refused."""
        refused = self._handshake.refused
        return {task for task, status in self._probe(tasks).items() if status.incarnation not in refused}

    def _losses(self, tasks: Collection[Task], statuses: Mapping[Task, TaskStatus] | None = None) -> dict[Task, str]:
        """Returns the servers that are not connected now, with the reasons; probes them if `statuses` is None."""
        present = self._present
        statuses = self._probe(tasks) if statuses is None else statuses
        addresses = self._addresses
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
        return task.job == "worker" and self._heartbeat.state(address).last_silence > connection.since

    def _seems_connected(self, task: Task) -> bool:
        connection, address = self._present.get(task), self._addresses.get(task)
        if connection is None or address is None or self._is_stale(task, address, connection):
            return False
        state = self._heartbeat.state(address)
        if state.liveness is Liveness.ANSWERING:
            return state.incarnation == connection.incarnation
        return state.liveness is Liveness.UNKNOWN

    def _broken_links(self, sources: Collection[Task], targets: Collection[Task]) -> list[tuple[Task, str]]:
        """Asks `sources` in parallel whether they reach `targets`. Leaves out servers that do not answer the client.

        Returns the source of each broken link, and a description with both addresses.
        """
        addresses = self._addresses
        answering = {
            task: address
            for task in {*sources, *targets}
            if (address := addresses.get(task)) is not None
            and self._heartbeat.state(address).liveness is Liveness.ANSWERING
        }
        pairs = {
            Link(answering[source], answering[target]): (source, target)
            for source in answering.keys() & set(sources)
            for target in answering.keys() & set(targets)
            if source != target
        }
        broken = {pairs[link]: words for link, words in self._links.broken(pairs).items()}
        # A link to or from a server that has died in between is not broken: the server is lost.
        alive = self._probe({task for pair in broken for task in pair})
        return [
            (source, f"{answering[source]} does not reach {target} at {answering[target]}: {words}")
            for (source, target), words in broken.items()
            if source in alive and target in alive
        ]

    def _describe(self, task: Task, what: str) -> str:
        """Returns the address of a server and the reason of its loss, with the obstacle if it is gone."""
        address = self._addresses.get(task)
        if address is None:
            return "it was removed"
        if what == _GONE:
            obstacle = self._heartbeat.state(address).obstacle or find_obstacles([address])[address]
            what = f"{_GONE}: {obstacle.value}"
        return f"{address} {what}"

    def _connect_once(self) -> list[Task]:
        """Connects to the servers that answer. Returns the missing servers: workers only while no worker answers."""
        servers = self._addresses
        if missing := self._missing(self._answering(servers)):
            return missing
        # There are no variables yet: a restarted parameter server has lost nothing.
        with self._turn:
            self._change(without=self._present, adding=servers)
        for error in self._handshake.refused.values():
            raise error
        return self._missing(self._present.keys() - self._losses(self._present))

    def _missing(self, answering: Collection[Task]) -> list[Task]:
        has_worker = any(task.job == "worker" for task in answering)
        needed = self._parameter_servers if has_worker else sorted(self._addresses)
        return [task for task in needed if task not in answering]

    def _why_missing(self, missing: Sequence[Task]) -> str:
        """Returns a sentence on why servers are not connected; opens connections to find out."""
        if self._last_error:
            return self._last_error
        addresses: dict[str, list[str]] = {}
        for address, obstacle in find_obstacles([self._addresses[task] for task in missing]).items():
            addresses.setdefault(obstacle.value, []).append(address)
        return "; ".join(f"{shortened(alike)}: {words}" for words, alike in addresses.items()) + "."

    def _name(self, missing: Sequence[Task]) -> str:
        names = [f"{task} ({self._addresses[task]})" for task in missing if task.job == "ps"]
        if workers := [self._addresses[task] for task in missing if task.job == "worker"]:
            names.append(f"any worker ({shortened(workers)})")
        return ", ".join(names)

    # These methods change the connections. `_disconnect` takes `_turn`; callers of the other methods hold `_turn`.

    def _disconnect(self, task: Task, lost: Connection | None) -> None:
        with self._turn:
            is_known = task in self._present or task in self._changes.addresses
            if is_known and (self._present.get(task) == lost or self._losses([task])):
                self._change(without=[task])

    def _replace(self, lost: Collection[Task]) -> bool:
        """Makes new connections to lost servers. Returns True if TensorFlow's server definition was updated."""
        must_leave = any(task.job == "worker" and task in self._changes.addresses for task in lost)
        self._present = _without(self._present, lost)
        return (not must_leave or self._change()) and self._change(adding=lost)

    def _change(self, without: Collection[Task] = (), adding: Collection[Task] = ()) -> bool:
        """Disconnects from the servers `without`, and connects to the servers `adding` if they answer.

        Returns True if TensorFlow's server definition was updated. If not, there is no new connection, but lost
        connections may be dropped.
        """
        self._present = present = _without(self._present, without)
        statuses = self._probe({*present, *adding})
        self._handshake.check_devices(statuses, self._addresses)
        lost = self._losses([task for task in present if task.job == "ps"], statuses)
        answering = {
            task: status.incarnation
            for task, status in statuses.items()
            if task not in lost and status.incarnation not in self._handshake.refused
        }
        plan = plan_change(present, adding, answering, self._parameter_servers)
        if plan is None or self._context.is_replaced:
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
        addresses = {task: self._addresses[task] for task in sorted({*kept, *new})}
        self._present = kept
        self.settled.clear()
        try:
            is_updated = self._update_server_def(addresses)
            # Workers are asked too: the copies on a worker, such as datasets, may be gone.
            gone = self._sentinels.gone([connection.number for connection in kept.values()])
            self._present = kept = {task: kept[task] for task in kept if kept[task].number not in gone}
        finally:
            self.settled.set()
        if is_updated:
            self._admit(kept, new, addresses)
        return is_updated

    def _update_server_def(self, addresses: Mapping[Task, str]) -> bool:
        """Updates TensorFlow's server definition. Returns False if the update failed; a later one may succeed."""
        try:
            self._changes.apply(addresses)
        except tf.errors.OpError as error:
            _logger.info("Connecting to %s failed; it is tried again.", ", ".join(map(str, addresses)))
            _logger.debug("TensorFlow's message about it:", exc_info=error)
            self._last_error = (
                f"Those that answer could not be connected to ({type(error).__name__}; TensorFlow's own message is "
                f"logged at the level DEBUG). Do they run the same TensorFlow as this program, {tf.version.VERSION}?"
            )
            return False
        self._last_error = ""
        # `watch` has the heartbeat look for the new connections immediately.
        for address in addresses.values():
            self._heartbeat.watch(address)
        return True

    def _admit(
        self, kept: Mapping[Task, Connection], new: Mapping[Task, Connection], addresses: Mapping[Task, str]
    ) -> None:
        """Makes the handshakes with new servers, and places the sentinels, after an update of the server definition."""
        admitted = {**kept, **self._handshake.admit(new, addresses)}
        self._lease.hold([addresses[task] for task in admitted])
        self._goodbye.addresses.update(addresses[task] for task in admitted)
        unplaced = self._sentinels.place({admitted[task].number: task.device for task in admitted})
        self._present = {task: admitted[task] for task in admitted if admitted[task].number not in unplaced}


def shortened(names: Sequence[str]) -> str:
    """Returns the first few names of a list, with the number of the others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _without(mapping: Mapping[Task, Value], tasks: Collection[Task]) -> dict[Task, Value]:
    return {task: value for task, value in mapping.items() if task not in tasks}


# Cached, because each call on a worker needs the worker's `Task`.
@functools.lru_cache(MAX_WORKERS)
def _worker(index: int) -> Task:
    return Task("worker", index)


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """A task that holds variables; its `device` is a name such as `/job:ps/replica:0/task:0`."""

    index: int
    device: str
    membership: Membership = dataclasses.field(repr=False)

    def healthy(self) -> bool:
        """Returns whether the server answers a probe and still holds this client's variables."""
        return self.membership.is_parameter_server_reachable(self.index)
