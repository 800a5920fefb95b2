"""Plans changes of the servers that TensorFlow is connected to (a pure function), and makes them in bounded time.

Updating TensorFlow's server definition (`update_server_def`) closes this client's contexts on the servers that leave.
Each leaving server first ends its calls for this client. A call may never end: a dataset of `from_generator` calls back
a generator in this process, which may wait. So changes are made on a separate thread:

    apply --> thread: update_server_def -----------------------> done
      |          in time? else shut down the connections to the servers that leave, which ends the wait for them
      '--------> still not in time: DeadlineExceededError; the thread is abandoned

Promises: `apply` returns or raises within five times `patience`. No change begins before the previous one has ended,
even if another strategy made the previous one, because TensorFlow has one cluster per process. After `leave` this
process is disconnected from all servers as soon as the change in progress has ended, however long that takes.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import ClassVar

import tensorflow as tf

from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.heartbeat.probes import TaskProbe
from coordinator.ps_strategy.membership.bounded_calls import CallThread
from coordinator.ps_strategy.membership.cluster_definition import Task, server_def
from coordinator.ps_strategy.tensorflow_internals.functions import FunctionRegistration
from coordinator.ps_strategy.tensorflow_internals.process import update_server_def

# The most patience while a strategy is being closed, in seconds, even if `heartbeat_timeout` is larger.
PATIENCE_AT_CLOSE = 4.0
# The interval at which a wait checks whether the patience was reduced, in seconds.
_LONGEST_SLEEP = 0.5
# How long a server that holds up a change may take to answer a probe, in seconds.
_PROBE_TIMEOUT = 0.5

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class Connection:
    """A connection to a server. If the connection or the server's process ends, this client's objects there are lost.

    `incarnation` is the random number that the server drew when it started; `number` is unique in this cluster; `since`
    is the time of connecting on the `time.monotonic` clock. Functions are called on `calling_device` of the server.
    """

    incarnation: int
    number: int
    since: float
    calling_device: str


def plan_change(
    connected: Mapping[Task, Connection],
    adding: Collection[Task],
    answering: Mapping[Task, int],
    parameter_servers: Collection[Task],
) -> tuple[dict[Task, Connection], dict[Task, int]] | None:
    """Decides which servers TensorFlow is connected to next: the servers that answer.

    `connected` has the connections to keep, `adding` further servers; `answering` the incarnations of the servers that
    answer, without parameter servers that have lost their variables.

    Returns the connections that stay, and the incarnations of the servers that get a new connection. Returns None if
    nothing may change now. Either a connected parameter server does not answer: TensorFlow would treat it as a new one
    and drop its variables. Or only some parameter servers would be connected: the others might stay unknown to them.
    """
    kept = {task: connection for task, connection in connected.items() if answering.get(task) == connection.incarnation}
    new = {task: answering[task] for task in {*connected, *adding} - set(kept) if task in answering}
    if any(task.job == "ps" and task not in kept for task in connected):
        return None
    if (kept or new) and not {*kept, *new} >= set(parameter_servers):
        return None
    return kept, new


class ClusterChanges:
    """Updates TensorFlow's server definition. One thread at a time may call `apply`, and any thread the other methods.

    If a server needs longer than `patience`, in seconds, to end its calls for this client, the connections to the
    server are shut down. For `client_timeout` see `update_server_def`. `addresses` has the servers in the current
    server definition; some may be lost.
    """

    _in_progress: ClassVar[concurrent.futures.Future[None] | None] = None
    # Held to begin a change.
    _beginning: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, protocol: str, client_address: str, client_timeout: float, patience: float) -> None:
        self._protocol = protocol
        self._client_address = client_address
        self._client_timeout = client_timeout
        self._patience = patience
        self._functions = FunctionRegistration(patience)
        # One thread makes all changes, since a server that joins is sent all functions, which may be tens of megabytes.
        self._thread = CallThread("coordinator-cluster-change")
        self.addresses: dict[Task, str] = {}

    def apply(self, addresses: Mapping[Task, str]) -> None:
        """Connects to exactly these servers.

        Raises DeadlineExceededError if this or the previous change takes too long; that change may still succeed.
        Raises CancelledError after `close`, and another OpError if a server does not answer.
        """
        if ClusterChanges._in_progress is not None:
            self._wait(ClusterChanges._in_progress)
            if not ClusterChanges._in_progress.done():
                raise _unfinished()
        leaving = {task: address for task, address in self.addresses.items() if task not in addresses}
        done = self._begin(addresses)
        self.addresses = {**self.addresses, **addresses}
        # Parameter servers come last, so that they may still receive the request that frees their variables.
        for job in ("worker", "ps"):
            self._wait(done)
            if not done.done():
                self._shut_down([address for task, address in leaving.items() if task.job == job])
        # If a server that stays freezes, the heartbeat shuts down its connections, which takes about `patience` too.
        self._wait(done, times=2)
        if not done.done():
            _logger.warning("TensorFlow has not finished updating its server definition; the next update waits for it.")
            raise _unfinished()
        done.result()
        self.addresses = dict(addresses)

    def hurry(self) -> float:
        """Limits the patience, because the strategy is being closed; returns the seconds that a change may take now."""
        self._patience = min(self._patience, PATIENCE_AT_CLOSE)
        return 5 * self._patience

    def leave(self) -> None:
        """Disconnects from all servers, as the last change, after a change in progress that does not end in time.

        Returns within twice the patience, even if the change in progress has not ended. The thread of the changes makes
        this change then: otherwise no other strategy could ever be made in this process. After `close` it does nothing.
        """
        try:
            done = self._begin({}, is_last=True)
        except tf.errors.CancelledError:
            return
        self._wait(done)
        if not done.done():
            self._shut_down([*self.addresses.values()])
            self._wait(done)

    @classmethod
    def wait_ended(cls, seconds: float) -> bool:
        """Waits for the change in progress, which a closed strategy may have left; returns whether it has ended."""
        change = cls._in_progress
        return change is None or bool(concurrent.futures.wait([change], seconds).done)

    def close(self) -> None:
        """Ends the thread, once a change in progress has ended, and undoes the patches of `FunctionRegistration`."""
        self._thread.end()
        self._functions.close()

    def _begin(self, addresses: Mapping[Task, str], *, is_last: bool = False) -> concurrent.futures.Future[None]:
        definition = server_def(self._protocol, self._client_address, addresses)

        def change() -> None:
            with self._functions.held_back():
                update_server_def(definition, self._client_timeout)

        with ClusterChanges._beginning:
            ClusterChanges._in_progress = done = self._thread.begin(change)
            if is_last:
                self._thread.end()
        return done

    def _shut_down(self, addresses: Collection[str]) -> None:
        with contextlib.ExitStack() as probes:
            waits = {
                address: probes.enter_context(TaskProbe(address)).begin_status(_PROBE_TIMEOUT) for address in addresses
            }
            answering = {address for address, wait in waits.items() if wait() is not None}
        if silent := [address for address in addresses if address not in answering]:
            text = "%s did not answer for %g s while this client disconnected; the connections are shut down."
            _logger.warning(text, ", ".join(silent), self._patience)
        elif addresses:
            _logger.warning(
                "%s did not end this client's calls within %g s; the connections are shut down, which loses nothing. "
                "Usual causes: a generator of tf.data.Dataset.from_generator that waits; on a busy machine, a worker "
                "that prepares a larger call.",
                ", ".join(addresses),
                self._patience,
            )
        for address in addresses:
            OpenConnections().shut_down(address)

    def _wait(self, change: concurrent.futures.Future[None], times: int = 1) -> None:
        """Waits for a change to end, at most `times` the patience, which may be reduced during the wait."""
        began = time.monotonic()
        while not change.done() and (left := began + times * self._patience - time.monotonic()) > 0:
            concurrent.futures.wait([change], min(left, _LONGEST_SLEEP))


def _unfinished() -> tf.errors.OpError:
    return tf.errors.DeadlineExceededError(None, None, "TensorFlow has not finished updating its server definition.")
