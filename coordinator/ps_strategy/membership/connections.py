"""The connections of this process to the servers of a cluster, and how they are changed.

    plan (`plan_change`, pure) --> update TensorFlow's server definition (`ClusterChanges`) --> admit the servers
                                                                          (`Handshake`, `SentinelVariables`)

Each step asks all servers in parallel, and ends in bounded time. A change keeps to these rules:

- Only servers that answer are in the server definition. One that dies meanwhile makes the update fail.
- All parameter servers are in it, or no server is: one that joins later may stay unknown to the others.
- It is left alone while a parameter server is out of TensorFlow's own reach, which would cost that server's variables.
  After each update a `SentinelVariable` shows whether the variables still exist.
- A lost worker leaves it before it is connected again, even if the same process answers: it lacks the functions that
  were registered meanwhile.
"""

import itertools
import logging
import time
from collections.abc import Collection, Mapping

import tensorflow as tf

from coordinator.heartbeat.watched_server import Liveness
from coordinator.options import Options
from coordinator.ps_strategy.membership.cluster_change import ClusterChanges, Connection, plan_change
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, Task
from coordinator.ps_strategy.membership.handshake import Handshake
from coordinator.ps_strategy.membership.known_servers import KnownServers, without_tasks
from coordinator.ps_strategy.membership.sentinel_variable import SentinelVariables

_logger = logging.getLogger("coordinator")


class Connections:
    """Connects to servers and disconnects from them. One thread at a time may change something; any may read.

    Args:
      definition: the cluster.
      client_address: `host:port` of this process's own TensorFlow server.
      servers: probes the servers.
      options: time limits.

    Attributes:
      present: the connections, whether their servers still answer or not. Replaced as a whole.
      last_error: why the last change failed, as a sentence for users; empty if it did not.
    """

    def __init__(
        self, definition: ClusterDefinition, client_address: str, servers: KnownServers, options: Options
    ) -> None:
        self._parameter_servers = definition.tasks("ps")
        self._servers = servers
        self._handshake = Handshake(client_address, options)
        self._sentinels = SentinelVariables(max(10.0, 2 * options.heartbeat_timeout))
        timeouts = options.client_timeout, options.heartbeat_timeout
        self._changes = ClusterChanges(definition.protocol, client_address, *timeouts)
        self._numbers = itertools.count()
        self.present: dict[Task, Connection] = {}
        self.last_error = ""

    def seems_connected(self, task: Task) -> bool:
        """Returns whether a server was connected when the heartbeat last heard from it, without asking."""
        connection, state = self.present.get(task), self._servers.last_state(task)
        if connection is None or state is None or self._is_stale(task, connection):
            return False
        if state.liveness is Liveness.ANSWERING:
            return state.incarnation == connection.incarnation
        return state.liveness is Liveness.UNKNOWN

    def losses(self, tasks: Collection[Task]) -> dict[Task, str]:
        """Asks servers, and returns those that are not connected now, with words on what happened."""
        present, addresses, statuses = self.present, self._servers.addresses, self._servers.probe(tasks)
        same = {
            task: addresses[task]
            for task, status in statuses.items()
            if task in present
            and task in addresses
            and status.incarnation == present[task].incarnation
            and not self._is_stale(task, present[task])
        }
        freed = self._handshake.freed(same.values())
        gone, restarted = "does not answer", "was restarted, or not heard from for long, and lost its variables"
        return {
            task: restarted if task in statuses else gone for task in tasks if task not in same or same[task] in freed
        }

    def answering(self, tasks: Collection[Task]) -> dict[Task, int]:
        """Asks servers, and returns the incarnations of those that answer and may take part."""
        incarnations = {task: status.incarnation for task, status in self._servers.probe(tasks).items()}
        return {task: found for task, found in incarnations.items() if not self._handshake.is_refused(found)}

    def raise_refusal(self) -> None:
        """Raises the `VersionMismatchError` of a server that was refused, if one was."""
        self._handshake.raise_refusal()

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
        self.present = present = without_tasks(self.present, without)
        answering = self.answering({*present, *adding})
        for task in self.losses([task for task in present if task.job == "ps"]):
            answering.pop(task, None)
        plan = plan_change(present, adding, answering, self._parameter_servers)
        if plan is None:
            return False
        kept, incarnations = plan
        numbers = [connection.number for task, connection in kept.items() if task.job == "ps"]
        if not self._sentinels.are_reachable(numbers):
            return False
        now = time.monotonic()
        new = {task: Connection(incarnation, next(self._numbers), now) for task, incarnation in incarnations.items()}
        connections = {**kept, **new}
        addresses = {task: self._servers.addresses[task] for task in sorted(connections)}
        self.present = kept
        is_updated = self._apply_server_def(addresses)
        self._sentinels.check(numbers)
        if is_updated:
            admitted = self._handshake.admit(connections, addresses)
            numbered = {task.device: each.number for task, each in admitted.items() if task.job == "ps"}
            lost = self._sentinels.place(numbered)
            self.present = {task: each for task, each in admitted.items() if task.device not in lost}
        return is_updated

    def replace(self, lost: Collection[Task]) -> bool:
        """Makes new connections to servers that were lost. Returns True if it could be tried."""
        must_leave = any(task.job == "worker" and self.is_in_server_def(task) for task in lost)
        self.present = without_tasks(self.present, lost)
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

    def hurry(self) -> float:
        """Shortens changes, one in progress too, for closing. Returns the longest that one may take now, in seconds."""
        return self._changes.hurry()

    def close(self) -> None:
        """Ends the lease's thread, and undoes the patches of TensorFlow, without changing anything on the servers."""
        self._changes.close()
        self._handshake.close()

    def _is_stale(self, task: Task, connection: Connection) -> bool:
        """Returns True if a worker was silent since it was connected, or a parameter server has lost its variables."""
        if task.job == "ps":
            return self._sentinels.is_gone(connection.number)
        return self._servers.was_silent_since(task, connection.since)

    def _apply_server_def(self, addresses: Mapping[Task, str]) -> bool:
        """Updates TensorFlow's server definition. Returns False if it failed, and a later attempt may succeed."""
        try:
            self._changes.apply(addresses)
        except tf.errors.OpError as error:
            names = ", ".join(map(str, addresses))
            _logger.info("Connecting to %s failed; it is tried again: %s", names, error.message)
            self.last_error = (
                f" Those that answer could not be connected to: {error.message} Do they run the same TensorFlow as "
                f"this program, {tf.version.VERSION}?"
            )
            return False
        self.last_error = ""
        self._servers.find_connections(addresses.values())
        return True
