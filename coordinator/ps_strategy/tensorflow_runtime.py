"""The runtime over TensorFlow servers: connects this process to them, runs work on the workers, notices who is gone.

    client ----- eager calls, one at a time per worker -----> worker 0, 1, ... -----> ps 0, 1, ...
      \\\\------- health probes, a channel for each task -----^------------------------^

A task is known by its address and by the incarnation that it had when it was connected to. It is lost when it does not
answer a probe, or answers as another incarnation. Only tasks that answer are ever named to TensorFlow, so that nobody
waits for a dead one; one that dies while it is named makes the naming fail, to be tried again.

Membership changes are made under one lock, which is never held together with the queue's. The return of one worker may
renew the connection to another that was restarted before anybody noticed; so an attempt that fails is judged by the
connection that it was begun with.
"""

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import portpicker
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.options import Options
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.cluster_definition import (
    CLIENT_JOB,
    ClusterDefinition,
    Task,
    client_server_def,
    server_def,
)
from coordinator.ps_strategy.failure_table import failure_of
from coordinator.ps_strategy.per_worker_resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals import CancellationManager
from coordinator.runtime import Failure
from coordinator.task_probe import TaskProbe, TaskStatus

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class Connection:
    """Our connection to one run of a server. What we made there is gone with the run, and with the connection.

    Attributes:
      incarnation: the number that the server drew when it started.
      number: differs from that of every other connection of this runtime.
    """

    incarnation: int
    number: int


class TensorFlowRuntime:
    """Implements `coordinator.runtime.Runtime` over a cluster of standard TensorFlow servers.

    Args:
      definition: the servers.
      options: time limits.

    Raises:
      RuntimeError: this process is connected to a cluster already.
      TimeoutError: the parameter servers, or the first worker, did not answer within `Options.connect_timeout`.
    """

    def __init__(self, definition: ClusterDefinition, options: Options) -> None:
        self._definition = definition
        self._options = options
        self._parameter_servers = definition.tasks("ps")
        self._workers = definition.tasks("worker")
        self._probes = {task: TaskProbe(address) for task, address in definition.addresses.items()}
        self._membership_lock = threading.Lock()
        self._connected: dict[Task, Connection] = {}
        self._connection_numbers = itertools.count()
        # What each worker's last attempt was begun with; each entry is used by its worker's thread alone.
        self._attempted: dict[int, Connection | None] = {}
        # Holds the executor of each worker's thread: a thread whose executor is dropped falls back to the default one.
        self._of_thread = threading.local()
        self._closed = False
        self._client_address = _join_as_client(definition)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def worker_devices(self) -> Sequence[str]:
        """The workers' names, by index."""
        return [task.device for task in self._workers]

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The parameter servers' names, by index."""
        return [task.device for task in self._parameter_servers]

    def bind_thread(self, worker: int) -> None:
        """Gives the calling thread its own executor, until it ends."""
        self._of_thread.executor = tensorflow_internals.bind_executor()

    def run(self, worker: int, work: Any, cancellation: Any) -> Any:
        """Runs `work.run_on(WorkerContext)`."""
        task = self._workers[worker]
        connection = self._attempted[worker] = self._connected.get(task)
        if connection is None:
            raise tf.errors.UnavailableError(None, None, f"{task} is not connected.")
        context = WorkerContext(worker, f"{task.device}/device:CPU:0", connection.number, cancellation)
        try:
            return work.run_on(context)
        except BaseException:
            # The executor keeps the error too, and would raise it again at the next call.
            self._of_thread.executor.clear_error()
            raise

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Sorts an error by which tasks answer; see `failure_table`."""
        was_renewed = self._attempted.get(worker) != self._connected.get(self._workers[worker])
        return failure_of(error, self.lost_parameter_server(), was_renewed or not self.is_reachable(worker))

    def is_reachable(self, worker: int) -> bool:
        """Whether the worker answers as the incarnation that we are connected to."""
        return self._is_connected(self._workers[worker])

    def is_parameter_server_reachable(self, index: int) -> bool:
        """Whether the parameter server answers as the incarnation that holds our variables."""
        return self._is_connected(self._parameter_servers[index])

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names the first parameter server that is gone or was restarted, if one was."""
        for task in self._parameter_servers:
            status = self._status(task)
            connection = self._connected.get(task)
            if status is None or connection is None or status.incarnation != connection.incarnation:
                what = "does not answer" if status is None else "was restarted and lost its variables"
                return ParameterServerLost(
                    str(task),
                    f"The parameter server {task} ({self._definition.addresses[task]}) {what}. Start it again if it is "
                    "down, close this strategy, make a new one, and restore the latest checkpoint.",
                )
        return None

    def reconnect(self, worker: int) -> bool:
        """Connects to a worker that was lost, if it answers now."""
        task = self._workers[worker]
        if self._status(task) is None or self.lost_parameter_server() is not None:
            return False
        with self._membership_lock:
            # The return of another worker may have brought this one back too.
            if not self._closed and not self._is_connected(task):
                self._name_members({task, *self._connected})
        return self._is_connected(task)

    def new_cancellation(self) -> CancellationManager:
        """A cancellation that has not been used yet."""
        return CancellationManager()

    def close(self) -> None:
        """Lets every server go, which frees what this client made on it."""
        self._closed = True
        if self._membership_lock.acquire(timeout=self._options.close_timeout):
            try:
                self._connected = {}
                self._name_members(set())
            finally:
                self._membership_lock.release()
        else:
            _logger.warning("A server that stopped answering still holds up a change of the cluster; it is not let go.")
        for probe in self._probes.values():
            probe.close()

    def __repr__(self) -> str:
        return f"<TensorFlowRuntime: connected to {', '.join(map(str, sorted(self._connected)))}>"

    def _status(self, task: Task) -> TaskStatus | None:
        return None if self._closed else self._probes[task].status(self._options.probe_timeout)

    def _is_connected(self, task: Task) -> bool:
        connection = self._connected.get(task)
        if connection is None:
            return False
        status = self._status(task)
        return status is not None and status.incarnation == connection.incarnation

    def _connect(self) -> None:
        """Connects to all parameter servers and to the workers that answer; the others are awaited by their threads."""
        deadline = time.monotonic() + self._options.connect_timeout
        reported = time.monotonic()
        pause = threading.Event()
        while True:
            awaited = self._awaited(self._answering(self._definition.addresses))
            if not awaited:
                # There are no variables yet: a parameter server that was restarted meanwhile is as good as before.
                self._connected = {}
                with self._membership_lock:
                    self._name_members(set(self._definition.addresses))
                awaited = self._awaited(list(filter(self._is_connected, self._connected)))
            if not awaited:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No connection within {self._options.connect_timeout:g} s: {awaited} did not answer. Are they "
                    "started, and are the addresses right? See also Options.connect_timeout."
                )
            if time.monotonic() - reported > min(10.0, self._options.stall_report_interval):
                reported = time.monotonic()
                _logger.warning("Waiting for %s to answer.", awaited)
            pause.wait(min(self._options.reconnect_interval, max(0.0, deadline - time.monotonic())))

    def _awaited(self, answering: Collection[Task]) -> str:
        """Words for what must answer before work can start and does not; empty if nothing."""
        missing = [
            f"{task} ({self._definition.addresses[task]})" for task in self._parameter_servers if task not in answering
        ]
        if not any(task in answering for task in self._workers):
            missing.append("any worker (" + ", ".join(self._definition.addresses[task] for task in self._workers) + ")")
        return ", ".join(missing)

    def _answering(self, tasks: Iterable[Task]) -> dict[Task, TaskStatus]:
        statuses = {task: self._status(task) for task in tasks}
        return {task: status for task, status in statuses.items() if status is not None}

    def _name_members(self, tasks: Iterable[Task]) -> None:
        """Connects to those of the tasks that answer, and to no others; called with the membership lock held.

        A parameter server that we are connected to stays named whatever it answers: to leave it out would make its
        variables unreadable for good. If the naming fails, no connection is new, and those that it ended are gone.
        """
        named = {task: connection for task, connection in self._connected.items() if task.job == "ps"}
        for task, status in self._answering(tasks).items():
            # A restarted parameter server keeps its old incarnation here: it answers, but our variables are gone.
            named.setdefault(task, self._connection(task, status))
        self._connected = {
            task: connection for task, connection in self._connected.items() if named.get(task) == connection
        }
        try:
            tensorflow_internals.update_server_def(self._server_def(named))
        except tf.errors.OpError as error:
            _logger.info("Connecting to %s failed and is tried again: %s", ", ".join(map(str, named)), error.message)
        else:
            self._connected = named

    def _connection(self, task: Task, status: TaskStatus) -> Connection:
        """The connection that we have to this run of the task, or a new one."""
        connection = self._connected.get(task)
        if connection is not None and connection.incarnation == status.incarnation:
            return connection
        return Connection(status.incarnation, next(self._connection_numbers))

    def _server_def(self, tasks: Iterable[Task]) -> Any:
        addresses = {task: self._definition.addresses[task] for task in sorted(tasks)}
        return server_def(self._definition.protocol, self._client_address, addresses)


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """A task that holds variables.

    Attributes:
      index: its task index.
      device: its name, such as `/job:ps/replica:0/task:0`.
    """

    index: int
    device: str
    runtime: TensorFlowRuntime = dataclasses.field(repr=False)

    def healthy(self) -> bool:
        """Whether it answers a probe now and still holds our variables."""
        return self.runtime.is_parameter_server_reachable(self.index)


def _join_as_client(definition: ClusterDefinition) -> str:
    """Makes this process the client, a cluster of one; returns the address of its own server.

    TensorFlow cannot stop the server that a client has for its workers to call back, so a process keeps the one that
    its first strategy started.
    """
    tensorflow_internals.prepare_process()
    current = tensorflow_internals.current_server_def()
    if current is None:
        address = definition.client_address or f"localhost:{portpicker.pick_unused_port()}"
        tensorflow_internals.set_server_def(client_server_def(definition.protocol, address))
        return address
    jobs = {job.name: dict(job.tasks) for job in current.cluster.job}
    if current.job_name != CLIENT_JOB or set(jobs) != {CLIENT_JOB}:
        raise RuntimeError(
            "This process is connected to a cluster already. One process has one strategy at a time: close the first "
            "one (strategy.close()) before making another."
        )
    return jobs[CLIENT_JOB][0]
