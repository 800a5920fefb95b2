"""The runtime over TensorFlow servers: connects this process to them, runs work on the workers, notices who is gone.

    client ----- eager calls, one at a time per worker -----> worker 0, 1, ... -----> ps 0, 1, ...
      \\\\------- health probes, a channel for each task -----^------------------------^

A task is known by its address and by the incarnation that it had when it was connected to. It is lost when it does not
answer a probe, or answers as another incarnation. Only tasks that answer are ever named to TensorFlow, so that nobody
waits for a dead one.

Membership changes are made under one lock, which is never held together with the queue's.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import portpicker
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.options import Options
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.cluster_definition import CLIENT_JOB, ClusterDefinition, Task, server_def
from coordinator.ps_strategy.failure_table import failure_of
from coordinator.ps_strategy.per_worker_resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals import CancellationManager
from coordinator.runtime import Failure
from coordinator.task_probe import TaskProbe, TaskStatus

_logger = logging.getLogger("coordinator")


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
        self._connected: dict[Task, TaskStatus] = {}
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
        """Gives the calling thread its own executor."""
        tensorflow_internals.bind_executor()

    def run(self, worker: int, work: Any, cancellation: Any) -> Any:
        """Runs `work.run_on(WorkerContext)`."""
        task = self._workers[worker]
        connected = self._connected.get(task)
        if connected is None:
            raise tf.errors.UnavailableError(None, None, f"{task} is not connected.")
        return work.run_on(WorkerContext(worker, f"{task.device}/device:CPU:0", connected.incarnation, cancellation))

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Sorts an error by which tasks answer; see `failure_table`."""
        return failure_of(error, self.lost_parameter_server(), not self.is_reachable(worker))

    def is_reachable(self, worker: int) -> bool:
        """Whether the worker answers as the incarnation that we are connected to."""
        return self._is_connected(self._workers[worker])

    def is_parameter_server_reachable(self, index: int) -> bool:
        """Whether the parameter server answers as the incarnation that holds our variables."""
        return self._is_connected(self._parameter_servers[index])

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names the first parameter server that is gone or was restarted, if one was."""
        for task in self._parameter_servers:
            status = self._probes[task].status(self._options.probe_timeout)
            connected = self._connected.get(task)
            if status is None or connected is None or status.incarnation != connected.incarnation:
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
        if self._probes[task].status(self._options.probe_timeout) is None or self.lost_parameter_server() is not None:
            return False
        # What the executor of this thread remembers of the lost worker would be raised by the next call.
        tensorflow_internals.bind_executor()
        try:
            with self._membership_lock:
                self._name_members({task, *self._connected})
        except tf.errors.OpError as error:
            _logger.info("Connecting to %s failed and is tried again: %s", task, error.message)
            return False
        return self._is_connected(task)

    def new_cancellation(self) -> CancellationManager:
        """A cancellation that has not been used yet."""
        return CancellationManager()

    def close(self) -> None:
        """Lets every server go, which frees what this client made on it."""
        with self._membership_lock:
            self._connected = {}
            with contextlib.suppress(tf.errors.OpError):
                tensorflow_internals.update_server_def(self._server_def({}))
        for probe in self._probes.values():
            probe.close()

    def __repr__(self) -> str:
        return f"<TensorFlowRuntime: connected to {', '.join(map(str, sorted(self._connected)))}>"

    def _is_connected(self, task: Task) -> bool:
        connected = self._connected.get(task)
        if connected is None:
            return False
        status = self._probes[task].status(self._options.probe_timeout)
        return status is not None and status.incarnation == connected.incarnation

    def _connect(self) -> None:
        """Connects to all parameter servers and to the workers that answer; the others are awaited by their threads."""
        deadline = time.monotonic() + self._options.connect_timeout
        reported = time.monotonic()
        pause = threading.Event()
        while True:
            awaited = self._awaited()
            if not awaited:
                try:
                    with self._membership_lock:
                        self._name_members(set(self._definition.addresses))
                    if not self._awaited(self._connected):
                        return
                except tf.errors.OpError as error:
                    _logger.info("Connecting failed and is tried again: %s", error.message)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No connection within {self._options.connect_timeout:g} s: {awaited or 'the servers'} did not "
                    "answer. Are they started, and are the addresses right? See also Options.connect_timeout."
                )
            if time.monotonic() - reported > min(10.0, self._options.stall_report_interval):
                reported = time.monotonic()
                _logger.warning("Waiting for %s to answer.", awaited or "the servers")
            pause.wait(self._options.reconnect_interval)

    def _awaited(self, answering: Any = None) -> str:
        """Words for what must answer before work can start and does not; empty if nothing."""
        if answering is None:
            answering = self._answering(self._definition.addresses)
        missing = [
            f"{task} ({self._definition.addresses[task]})" for task in self._parameter_servers if task not in answering
        ]
        if not any(task in answering for task in self._workers):
            missing.append("any worker (" + ", ".join(self._definition.addresses[task] for task in self._workers) + ")")
        return ", ".join(missing)

    def _answering(self, tasks: Any) -> dict[Task, TaskStatus]:
        statuses = {task: self._probes[task].status(self._options.probe_timeout) for task in tasks}
        return {task: status for task, status in statuses.items() if status is not None}

    def _name_members(self, tasks: set[Task]) -> None:
        """Connects to those of the tasks that answer, and to no others; called with the membership lock held.

        A parameter server that we are connected to stays named whatever it answers: to leave it out would make its
        variables unreadable for good.
        """
        answering = self._answering(tasks)
        held = {task: status for task, status in self._connected.items() if task.job == "ps"}
        tensorflow_internals.update_server_def(self._server_def({**answering, **held}))
        # A restarted parameter server keeps its old incarnation here: it answers, but our variables are gone.
        self._connected = {**answering, **held}

    def _server_def(self, tasks: Any) -> Any:
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
        tensorflow_internals.set_server_def(server_def(definition.protocol, address, {}))
        return address
    jobs = {job.name: dict(job.tasks) for job in current.cluster.job}
    if current.job_name != CLIENT_JOB or set(jobs) != {CLIENT_JOB}:
        raise RuntimeError(
            "This process is connected to a cluster already. One process has one strategy at a time: close the first "
            "one (strategy.close()) before making another."
        )
    return jobs[CLIENT_JOB][0]
