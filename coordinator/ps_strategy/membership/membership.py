"""Which servers the cluster has, and which of them this process is connected to.

    described --answers--> connected --silent, gone, restarted, or lost by a call--> let go --answers--> connected, anew

A server is known by its address and by the incarnation that it had when it was connected to. It is lost when it does
not answer a probe, answers as another incarnation, or has been silent for so long that the heartbeat hung up on it.
Only servers that answer are ever named to TensorFlow; one that dies while it is named makes that fail. All
parameter servers are named or nothing is: one that joins later may stay unknown to the others. One that is out of
TensorFlow's own reach would lose what it has, so nothing is named then either; and after each naming its `Witness` says
whether it has. A lost worker is disconnected before it is connected to again, even if it is the same run of the server:
functions that were registered meanwhile have not reached it. After a recovery it has to reach all parameter servers.

Changes are made under one lock, which is never held together with the queue's, and in bounded time: `ClusterChanges`.
"""

import itertools
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from coordinator.errors import ParameterServerLost, StrategyClosedError
from coordinator.heartbeat.heartbeat import Heartbeat
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.pulse import PulseState
from coordinator.heartbeat.task_probe import TaskProbe, TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.connection import Connection
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, Task, check_address
from coordinator.ps_strategy.membership.sentinel_variable import Witnesses
from coordinator.ps_strategy.server_admission import ServerAdmission

_logger = logging.getLogger("coordinator")

Value = TypeVar("Value")


class Membership:
    """Connects this process to the servers of a cluster that may change.

    Args:
      definition: the servers at the beginning. The parameter servers stay; workers come and go.
      client_address: `host:port` of this process's own TensorFlow server.
      options: time limits.
    """

    def __init__(self, definition: ClusterDefinition, client_address: str, options: Options) -> None:
        self._options = options
        self._admission = ServerAdmission(client_address, options)
        self._heartbeat = Heartbeat(options.heartbeat_interval, options.heartbeat_timeout)
        self._lock = threading.Lock()
        # Replaced as a whole, under the lock, so that they can be read without it.
        self._addresses = dict(definition.addresses)
        self._probes = {task: TaskProbe(address) for task, address in self._addresses.items()}
        self._connected: dict[Task, Connection] = {}
        self._numbers = itertools.count()
        self._witnesses = Witnesses(max(10.0, 2 * options.heartbeat_timeout))
        timeouts = options.client_timeout, options.heartbeat_timeout
        self._changes = ClusterChanges(definition.protocol, client_address, *timeouts)
        self._complaint = ""  # Why the last change of the cluster failed, for the message of a TimeoutError.
        self._closed = self._has_recovered = False
        self.parameter_servers = definition.tasks("ps")
        self._heartbeat.start()
        for address in self._addresses.values():
            self._heartbeat.watch(address)

    @property
    def workers(self) -> Mapping[int, Task]:
        """The workers that there are now, by index."""
        return {task.index: task for task in sorted(self._addresses) if task.job == "worker"}

    @property
    def addresses(self) -> Mapping[Task, str]:
        """Where each server is."""
        return self._addresses

    def connection(self, task: Task) -> Connection | None:
        """The connection to a server, if there is one and whether it still serves or not."""
        return self._connected.get(task)

    def is_connected(self, task: Task) -> bool:
        """Whether a server answers a probe now, as the incarnation that we are connected to."""
        connection = self._connected.get(task)
        if connection is None or self._is_void(task, connection):
            return False
        status = self._status(task)
        is_same = status is not None and status.incarnation == connection.incarnation
        return is_same and not self._admission.is_forgotten(self._addresses[task])

    def seems_connected(self, task: Task) -> bool:
        """The same, by the last that the heartbeat has heard. Asks nobody, and may be late."""
        connection, address = self._connected.get(task), self._addresses.get(task)
        if connection is None or address is None or self._is_void(task, connection):
            return False
        pulse = self._heartbeat.state(address)
        if pulse.state is PulseState.ANSWERING:
            return pulse.incarnation == connection.incarnation
        return pulse.state is PulseState.UNKNOWN

    def lost_parameter_servers(self) -> tuple[str, ...]:
        """The names of the parameter servers that are gone or were restarted."""
        return tuple(str(task) for task in self.parameter_servers if not self.is_connected(task))

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names the first parameter server that is gone or was restarted, if one was."""
        for task in self.parameter_servers:
            if not self.is_connected(task):
                gone = self._status(task) is None
                what = "does not answer" if gone else "was restarted, or not heard of for long, and lost its variables"
                return ParameterServerLost(
                    str(task),
                    f"The parameter server {task} ({self._addresses[task]}) {what}. Start it again if it is down. "
                    "Without strategy.restore_from, close this strategy, make a new one, and restore the latest "
                    "checkpoint.",
                )
        return None

    def connect(self) -> None:
        """Connects to all parameter servers and to the workers that answer; at least one must.

        Raises:
          TimeoutError: they did not answer within `Options.connect_timeout`.
          VersionMismatchError: one runs another TensorFlow, and `Options.version_mismatch` does not allow it.
        """
        deadline = time.monotonic() + self._options.connect_timeout
        reported = time.monotonic()
        pause = threading.Event()
        while True:
            awaited = self._awaited(self._answering(self._addresses))
            if not awaited:
                # There are no variables yet: a parameter server that was restarted meanwhile is as good as before.
                with self._lock:
                    self._connected = {}
                    self._name(self._addresses)
                self._admission.raise_refusal()
                awaited = self._awaited(list(filter(self.is_connected, self._connected)))
            if not awaited:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No connection within {self._options.connect_timeout:g} s: {awaited} did not answer. Are they "
                    f"started, and are the addresses right? See also Options.connect_timeout.{self._complaint}"
                )
            if time.monotonic() - reported > min(10.0, self._options.stall_report_interval):
                reported = time.monotonic()
                _logger.warning("Waiting for %s to answer.", awaited)
            pause.wait(min(self._options.reconnect_interval, max(0.0, deadline - time.monotonic())))

    def let_go(self, task: Task, lost: Connection | None) -> None:
        """Gives up the connection to a worker, so that nothing waits for it, if it still is the one that was lost."""
        with self._lock:
            is_known = task in self._connected or task in self._changes.named
            if is_known and (self._connected.get(task) == lost or not self.is_connected(task)):
                self._connected = _without(self._connected, task)
                self._name(self._connected)

    def reconnect(self, task: Task) -> bool:
        """Connects to a worker that was lost, if it answers now."""
        if not self._answering([task]) or self.lost_parameter_server() is not None:
            return False
        with self._lock:
            # The return of another worker may have brought this one back too.
            if not self._closed and task in self._addresses and not self.is_connected(task):
                self._renew([task])
        if self._has_recovered:
            self.reach_parameter_servers([task])
        return self.is_connected(task)

    def reach_parameter_servers(self, workers: Collection[Task] | None = None) -> None:
        """Makes workers, or all servers if None, reach the parameter servers; disconnects workers that cannot.

        Calls from a server that has not reached a recovered one yet would fail on the way, half applied.
        """
        present = self._connected
        asked = [task for task in present if task.job == "worker" and (workers is None or task in workers)]
        if present.keys() >= set(self.parameter_servers):
            numbers = [present[task].number for task in self.parameter_servers]
            if workers is None and not self._witnesses.reach_each_other(numbers):
                _logger.warning("The parameter servers do not all reach each other yet; functions may run twice.")
            for task in self._witnesses.unreached_from(asked, numbers):
                _logger.warning("%s does not reach all parameter servers; it is connected to again.", task)
                self.let_go(task, present[task])

    def reconnect_parameter_servers(self) -> bool:
        """Connects to all parameter servers that were lost, if each of them answers now; their variables are gone.

        Workers that answer stay connected. False if a parameter server does not answer, or dies while it is named.
        """
        if len(self._answering(self.parameter_servers)) < len(self.parameter_servers):
            return False
        with self._lock:
            lost = [task for task in self.parameter_servers if not self.is_connected(task)]
            if lost and not self._closed:
                self._has_recovered = self._renew(lost) or self._has_recovered
        return all(map(self.is_connected, self.parameter_servers))

    def add_worker(self, index: int, address: str) -> None:
        """There is one more worker from now on; `reconnect` connects to it.

        Raises:
          ValueError: that is no address, or a server of the cluster has it.
        """
        with self._lock:
            self._settle_at(Task("worker", index), address)

    def move_worker(self, index: int, address: str) -> None:
        """A worker is at another address from now on; what it runs fails, and `reconnect` connects to it there.

        Raises:
          ValueError: that is no address, or another server has it.
        """
        with self._lock:
            task = Task("worker", index)
            check_address(task, address, self._addresses)
            self._leave(task)
            self._settle_at(task, address)

    def remove_worker(self, index: int) -> None:
        """Lets a worker go; what it runs fails."""
        with self._lock:
            self._leave(Task("worker", index))

    def close(self) -> None:
        """Lets every server go, which frees what this client made on it."""
        self._closed = True
        if self._lock.acquire(timeout=self._changes.hurry()):
            try:
                self._connected = {}
                self._name(())
            finally:
                self._lock.release()
        else:
            _logger.warning("A server that stopped answering still holds up a change of the cluster; it is not let go.")
        self._changes.close()
        self._heartbeat.close()
        self._admission.close()
        for probe in self._probes.values():
            probe.close()

    def __repr__(self) -> str:
        return f"<Membership: connected to {', '.join(map(str, sorted(self._connected)))}>"

    def _status(self, task: Task) -> TaskStatus | None:
        address = self._addresses.get(task)
        if self._closed or address is None or self._heartbeat.is_silent(address):
            return None
        try:
            return self._probes[task].status(self._options.probe_timeout)
        except (KeyError, ValueError):
            # The server was removed, or moved, this very moment.
            return None

    def _is_void(self, task: Task, connection: Connection) -> bool:
        """Whether a worker was hung up on since it was connected to, or a parameter server has lost what it had."""
        if task.job == "ps":
            return self._witnesses.are_gone(connection.number)
        address = self._addresses.get(task)
        return address is None or self._heartbeat.last_silence(address) > connection.since

    def _answering(self, tasks: Iterable[Task]) -> dict[Task, TaskStatus]:
        statuses = {task: self._status(task) for task in tasks}
        return {
            task: status
            for task, status in statuses.items()
            if status is not None and not self._admission.is_refused(status.incarnation)
        }

    def _awaited(self, answering: Collection[Task]) -> str:
        """Words for what must answer before work can start and does not; empty if nothing."""
        missing = [f"{task} ({self._addresses[task]})" for task in self.parameter_servers if task not in answering]
        if not any(task in answering for task in self.workers.values()):
            missing.append("any worker (" + ", ".join(self._addresses[task] for task in self.workers.values()) + ")")
        return ", ".join(missing)

    # With the lock held:

    def _settle_at(self, task: Task, address: str) -> None:
        if self._closed:
            raise StrategyClosedError(f"{task} cannot be added: the strategy is closed.")
        check_address(task, address, self._addresses)
        self._probes = {**self._probes, task: TaskProbe(address)}
        self._addresses = {**self._addresses, task: address}
        self._heartbeat.watch(address)

    def _leave(self, task: Task) -> None:
        """Forgets a worker, and ends the calls to it."""
        address, probe = self._addresses[task], self._probes[task]
        self._connected = _without(self._connected, task)
        self._addresses = _without(self._addresses, task)
        self._probes = _without(self._probes, task)
        self._name(self._connected)
        # A call that the server does not end would go on for ever, since nobody watches it any more.
        OpenConnections().shut_down(address)
        self._heartbeat.forget(address)
        probe.close()

    def _renew(self, lost: Collection[Task]) -> bool:
        """Makes new connections to servers that were lost; whether it could be tried."""
        kept = _without(self._connected, *lost)
        stale_workers = [task for task in lost if task.job == "worker" and task in self._changes.named]
        self._connected = kept
        return (not stale_workers or self._name(kept)) and self._name({*kept, *lost})

    def _name(self, tasks: Iterable[Task]) -> bool:
        """Connects to those of the tasks that answer, and to no others; whether TensorFlow could be told.

        If the naming fails, no connection is new, and those that it ended are gone.
        """
        parameter_servers = {task: kept for task, kept in self._connected.items() if task.job == "ps"}
        numbers = [kept.number for kept in parameter_servers.values()]
        if not (all(map(self.is_connected, parameter_servers)) and self._witnesses.are_reached(numbers)):
            return False
        named = dict(parameter_servers)
        # The parameter servers have just answered.
        for task, status in self._answering(set(tasks) - set(named)).items():
            connection: Any = self._connected.get(task)
            if connection is None or connection.incarnation != status.incarnation:
                connection = Connection(status.incarnation, next(self._numbers), time.monotonic())
            named[task] = connection
        if named and not named.keys() >= set(self.parameter_servers):
            return False
        self._connected = {task: kept for task, kept in self._connected.items() if named.get(task) == kept}
        addresses = {task: self._addresses[task] for task in sorted(named)}
        try:
            self._changes.make(addresses)
        except tf.errors.OpError as error:
            _logger.info("Connecting to %s failed and is tried again: %s", ", ".join(map(str, named)), error.message)
            self._complaint = (
                f" Those that answer could not be connected to: {error.message} Do they run the same TensorFlow as "
                f"this program, {tf.version.VERSION}?"
            )
            self._witnesses.question(numbers)
            return False
        self._complaint = ""
        self._witnesses.question(numbers)
        for address in addresses.values():
            # Has it look at once for the connections that were made just now.
            self._heartbeat.watch(address)
        admitted = self._admission.admit(named, addresses)
        unwitnessed = self._witnesses.place({t.device: each.number for t, each in admitted.items() if t.job == "ps"})
        self._connected = {task: each for task, each in admitted.items() if task.device not in unwitnessed}
        return True


def _without(mapping: Mapping[Task, Value], *tasks: Task) -> dict[Task, Value]:
    return {task: value for task, value in mapping.items() if task not in tasks}
