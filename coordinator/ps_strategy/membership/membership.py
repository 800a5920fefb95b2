"""Which servers of the cluster this process is connected to.

    known --answers--> connected --silent, gone, restarted, or lost by a call--> disconnected --answers--> connected

A connection is to one incarnation of a server. It is lost when the server does not answer a probe, answers as another
incarnation, has freed what this client created there, or was silent for so long that the heartbeat shut down the
connections to it; a worker's, too, when the worker does not reach a parameter server. A worker that was lost is
connected again only once it reaches all of them.

One change is made at a time, in bounded time. `_turn` ensures that; servers are asked while it is held, since what they
answer decides the change. So it is never taken together with another lock, nor by a method that only reads or asks, nor
to add a worker: only what changes connections waits for another change.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from coordinator.errors import ParameterServerLost, StrategyClosedError
from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.options import Options
from coordinator.ps_strategy.membership.client_process import CHILDREN, join_as_client
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, Task, check_address
from coordinator.ps_strategy.membership.connections import Connections, shortened

_logger = logging.getLogger("coordinator")

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
