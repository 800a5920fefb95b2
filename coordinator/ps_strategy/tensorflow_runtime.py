"""The runtime over TensorFlow servers: connects this process to them, runs work on the workers, says who is gone.

    client ----- eager calls, one at a time per worker -----> worker 0, 1, ... -----> ps 0, 1, ...
      \\------- heartbeat, and probes, on their own ----------^------------------------^

Which servers there are, and whether they are connected, is the `Membership`'s business. The return of one worker may
renew the connection to another that was restarted before anybody noticed; so an attempt that fails is judged by the
connection that it was begun with.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import portpicker
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.options import Options
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.calls.scheduled_call import ScheduledCall
from coordinator.ps_strategy.connection import Connection
from coordinator.ps_strategy.failure_table import failure_of
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB, ClusterDefinition, Task, client_server_def
from coordinator.ps_strategy.membership.membership import Membership
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals import CancellationManager
from coordinator.runtime import Failure, Likeness


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
        # What each worker's last attempt was begun with; each entry is used by its worker's thread alone.
        self._attempted: dict[int, Connection | None] = {}
        # Holds the executor of each worker's thread: a thread whose executor is dropped falls back to the default one.
        self._of_thread = threading.local()
        self._membership = Membership(definition, _join_as_client(definition), options)
        try:
            self._membership.connect()
        except BaseException:
            self.close()
            raise

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """Where each worker is (`host:port`), by index."""
        return {index: self._membership.addresses[task] for index, task in self._membership.workers.items()}

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The parameter servers' names, by index."""
        return [task.device for task in self._membership.parameter_servers]

    def worker_device(self, worker: int) -> str:
        """The name of a worker."""
        return _worker(worker).device

    def add_worker(self, worker: int, address: str) -> None:
        """There is one more worker from now on; see `Membership.add_worker`."""
        self._membership.add_worker(worker, address)

    def move_worker(self, worker: int, address: str) -> None:
        """A worker is at another address from now on; see `Membership.move_worker`."""
        self._membership.move_worker(worker, address)

    def remove_worker(self, worker: int) -> None:
        """Lets a worker go; see `Membership.remove_worker`."""
        self._membership.remove_worker(worker)

    def bind_thread(self, worker: int) -> None:
        """Gives the calling thread its own executor, until it ends."""
        self._of_thread.executor = tensorflow_internals.bind_executor()

    def run(self, worker: int, work: Any, cancellation: Any) -> Any:
        """Runs `work.run_on(WorkerContext)`."""
        return self._run(worker, work.run_on, cancellation)

    def likeness(self, worker: int, work: Any) -> Likeness | None:
        """Calls that were scheduled may be alike; what else is run is not."""
        return work.likeness_on(worker) if isinstance(work, ScheduledCall) else None

    def run_fused(self, worker: int, works: Sequence[Any], cancellation: Any) -> Sequence[Any]:
        """Runs scheduled calls that are alike as one."""
        return self._run(worker, functools.partial(ScheduledCall.run_together, works), cancellation)

    def _run(self, worker: int, run_on: Callable[[WorkerContext], Any], cancellation: Any) -> Any:
        task = _worker(worker)
        connection = self._attempted[worker] = self._membership.connection(task)
        if connection is None:
            raise tf.errors.UnavailableError(None, None, f"{task} is not connected.")
        context = WorkerContext(worker, f"{task.device}/device:CPU:0", connection.number, cancellation)
        try:
            return run_on(context)
        except BaseException:
            # The executor keeps the error too, and would raise it again at the next call.
            self._of_thread.executor.clear_error()
            raise

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Sorts an error by which tasks answer; see `failure_table`."""
        was_renewed = self._attempted.get(worker) != self._membership.connection(_worker(worker))
        return failure_of(error, self.lost_parameter_server(), was_renewed or not self.is_reachable(worker))

    def is_reachable(self, worker: int) -> bool:
        """Whether the worker answers as the incarnation that we are connected to."""
        return self._membership.is_connected(_worker(worker))

    def seems_reachable(self, worker: int) -> bool:
        """The same, by the last that was heard of it."""
        return self._membership.seems_connected(_worker(worker))

    def is_parameter_server_reachable(self, index: int) -> bool:
        """Whether the parameter server answers as the incarnation that holds our variables."""
        return self._membership.is_connected(self._membership.parameter_servers[index])

    def seem_parameter_servers_reachable(self) -> bool:
        """Whether all of them do, by the last that was heard of them."""
        return all(map(self._membership.seems_connected, self._membership.parameter_servers))

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names the first parameter server that is gone or was restarted, if one was."""
        return self._membership.lost_parameter_server()

    def lost_parameter_servers(self) -> tuple[str, ...]:
        """The names of all that are."""
        return self._membership.lost_parameter_servers()

    def reconnect_parameter_servers(self) -> bool:
        """Connects to those that were lost, if all answer; see `Membership.reconnect_parameter_servers`."""
        return self._membership.reconnect_parameter_servers()

    def reach_parameter_servers(self) -> None:
        """Has each worker reach all parameter servers; see `Membership.reach_parameter_servers`."""
        self._membership.reach_parameter_servers()

    def disconnect(self, worker: int) -> None:
        """Lets go of a worker that was lost, so that nothing waits for it."""
        self._membership.let_go(_worker(worker), self._attempted.get(worker))

    def reconnect(self, worker: int) -> bool:
        """Connects to a worker that was lost, if it answers now."""
        return self._membership.reconnect(_worker(worker))

    def new_cancellation(self) -> CancellationManager:
        """A cancellation that has not been used yet."""
        return CancellationManager()

    def close(self) -> None:
        """Lets every server go, which frees what this client made on it."""
        self._membership.close()

    def __repr__(self) -> str:
        return f"<TensorFlowRuntime: {self._membership}>"


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


def _worker(index: int) -> Task:
    return Task("worker", index)


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
