"""Runs work on workers that are TensorFlow servers.

    client ----- eager calls, one at a time per worker -----> worker 0, 1, ... -----> ps 0, 1, ...
      \\------- heartbeats and probes (`Membership`) --------^------------------------^

`Membership` knows the servers and the client's connections. If a worker was restarted and its loss was not noticed yet,
the reconnection of another worker may renew its connection too. So a failed attempt is judged by the connection with
which the attempt began.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost
from coordinator.ps_strategy.calls.traced_function import BROKEN_CONNECTION, ScheduledCall
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.membership import Membership
from coordinator.ps_strategy.per_worker.dataset import EndOfDataError
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, bind_executor
from coordinator.ps_strategy.tensorflow_internals.process import NOT_CALLED_BACK
from coordinator.runtime import Builds, Failure, FailureKind

_logger = logging.getLogger("coordinator")

# Raised for a broken connection, but also by operations and by Python code in a graph. A text of the transport proves a
# broken connection, except in an exception of Python. "Additional GRPC error information" proves nothing: it only shows
# that a server has passed an error on.
_TRANSIENT_IN_TRANSPORT = (tf.errors.UnknownError, tf.errors.InternalError)
_OF_TRANSPORT = re.compile(
    r"RecvFromRemoteAsync is cancelled|RST_STREAM|stream (removed|terminated)|socket closed|parsing HTTP/2|"
    r"connection (reset|refused|dropped)|broken pipe|(recv|send)msg:|failed to connect|keepalive|transport (is )?clos",
    re.IGNORECASE,
)
_OF_PYTHON = "Traceback (most recent call last)"
# What calls raise on a server that has lost a variable or resource of this client, and what others say of a context, a
# function or a tensor that is gone. No other error can follow from an update of the server definition.
_OF_LOST_RESOURCES = (tf.errors.NotFoundError, tf.errors.FailedPreconditionError)
_OF_LOST_OBJECTS = re.compile(
    r"context[_ ]id|remote[_ ]handle|unknown device|uninitialized|not (been )?(found|exist|defined|initialized)|"
    r"no longer|(could not|cannot|unable to|failed to) find",
    re.IGNORECASE,
)
# In seconds. Such an error counts as the function's own after this wait for an update of the server definition.
_SETTLING_TIMEOUT = 30.0


class TensorFlowRuntime:
    """Implements `coordinator.runtime.Runtime` over the TensorFlow servers of a `Membership`."""

    def __init__(self, membership: Membership) -> None:
        self.builds = Builds()
        # By worker: the connection, and the two devices and the constants that all contexts of the connection share.
        self._known: dict[int, tuple[Connection, str, str, dict[bool, Any]]] = {}
        self._membership = membership
        # The executors of the workers' threads, kept alive here: a thread whose executor is deleted falls back to the
        # default executor. They are not thread-local, because a forked process deletes its thread-locals, and the
        # deletion of an executor waits for its calls.
        self._executors: dict[int, Any] = {}
        self._has_warned = False

    def bind_thread(self, worker: int) -> None:
        """Gives the calling thread, which makes a worker's calls, its own executor until the thread ends."""
        self._executors[worker] = bind_executor()

    def run(self, worker: int, work: Callable[[WorkerContext], Any], cancellation: Any) -> Any:
        connection = self._membership.begin_attempt(worker)
        if connection is None:
            raise tf.errors.UnavailableError(None, None, f"{self._membership.worker_device(worker)} is not connected.")
        try:
            return work(self._context(worker, connection, cancellation))
        except BaseException:
            # The executor keeps the error too, and would raise it again at the next call.
            self._executors[worker].clear_error()
            raise

    def _context(self, worker: int, connection: Connection, cancellation: Any) -> WorkerContext:
        known = self._known.get(worker)
        if known is None or known[0] is not connection:
            device = self._membership.worker_device(worker)
            known = connection, f"{device}/device:CPU:0", f"{device}{connection.calling_device}", {}
            self._known[worker] = known
        _, cpu, calling, constants = known
        return WorkerContext(worker, cpu, calling, connection.number, cancellation, self.builds, constants)

    def ready(self, worker: int, work: ScheduledCall) -> Mapping[int, float]:
        """Returns the numbers of calls like `work` that can be fused without a build, with the seconds of the build."""
        connection = self._membership.present_connection(worker)
        return {} if connection is None else work.function.ready_sizes(worker, connection.number)

    def prepare(self, worker: int, work: ScheduledCall, like: ScheduledCall, count: int) -> None:
        """Has a fused call of `count` calls like `work` built and prepared, unless a build is in progress."""
        connection = self._membership.present_connection(worker)
        if connection is not None and not work.function.is_preparing(worker, count):
            work.prepare(like, count, self._context(worker, connection, None))

    def most_fused(self, worker: int, work: ScheduledCall) -> int:
        return work.most_fused_on(worker)

    def run_fused(self, worker: int, works: Sequence[ScheduledCall], cancellation: Any) -> Sequence[Any]:
        return self.run(worker, functools.partial(works[0].run_fused, works), cancellation)

    def run_steps(self, worker: int, work: ScheduledCall, count: int, cancellation: Any) -> Any:
        """Runs a scheduled call several times as one call; returns the results, stacked along a new first axis."""
        return self.run(worker, functools.partial(work.run_steps, count), cancellation)

    def classify(self, worker: int | None, error: BaseException) -> Failure:
        if worker is not None and NOT_CALLED_BACK in str(error) and not self._has_warned:
            # The warning explains slow retries: each takes as long as the network needs to refuse a connection.
            self._has_warned = True
            device = self._membership.worker_device(worker)
            _logger.warning("A function on %s is tried again, which may take a minute: %s", device, NOT_CALLED_BACK)
        failure = self._failure_of(worker, error)
        if failure.kind in (FailureKind.USER, FailureKind.INPUT) and _may_follow_from_loss(_cause(error)):
            # A call that finds no variables on a server may fail before the membership knows that they are gone. Any
            # update may destroy variables, also on servers that stay.
            self._membership.settled.wait(_SETTLING_TIMEOUT)
            failure = self._failure_of(worker, error)
        return failure

    def _failure_of(self, worker: int | None, error: BaseException) -> Failure:
        lost = self._membership.lost_parameter_server()
        if worker is None:
            return failure_of(error, lost, is_worker_lost=False)
        failure = failure_of(error, lost, self._membership.is_attempt_lost(worker))
        if failure.kind is FailureKind.WORKER_LOST and self._membership.is_unlinked(worker):
            return dataclasses.replace(failure, kind=FailureKind.LINK_LOST)
        return failure

    def new_cancellation(self) -> CancellationManager:
        return CancellationManager()


def failure_of(error: BaseException, parameter_server: ParameterServerLost | None, is_worker_lost: bool) -> Failure:
    """Classifies an error as one of the kinds of failure that the core knows.

    The state of the tasks decides first. A task is lost if it does not answer, or answers as another incarnation than
    the connected one, whichever error TensorFlow has raised. If all tasks are reachable, the class of the error
    decides. The message decides if both the transport and functions raise the class. Calls that this library cancels
    raise `ClosureCancelledError`; a `CancelledError` of TensorFlow comes from a server. `parameter_server` is the error
    that names a lost parameter server, if one is lost.
    """
    if isinstance(error, ClosureCancelledError):
        return Failure(FailureKind.CANCELLED, error)
    cause = _cause(error)
    if isinstance(cause, tf.errors.OpError):
        if parameter_server is not None:
            parameter_server.original_exception = cause
            return Failure(FailureKind.PARAMETER_SERVER_LOST, parameter_server)
        if is_worker_lost:
            return Failure(FailureKind.WORKER_LOST, error)
        # Every task is alive, and another attempt may succeed. Either a connection between two tasks was refused, reset
        # or timed out; or a server cancelled a call because it lost the connection to another server; or a server had
        # dropped a context, which was replaced since. docs/network.md lists the errors of TensorFlow by fault.
        if isinstance(cause, BROKEN_CONNECTION) or (
            isinstance(cause, _TRANSIENT_IN_TRANSPORT) and _is_of_transport(str(cause.message))
        ):
            return Failure(FailureKind.TRANSIENT, error)
    if isinstance(error, EndOfDataError):
        return Failure(FailureKind.END_OF_DATA, error, error.ended)
    return Failure(FailureKind.INPUT if isinstance(error, ClosureInputError) else FailureKind.USER, error)


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, ClosureInputError) else error


def _may_follow_from_loss(cause: BaseException | None) -> bool:
    """Returns whether an error may say that something of this client is gone from a server."""
    if not isinstance(cause, tf.errors.OpError) or _OF_PYTHON in str(cause.message):
        return False
    return isinstance(cause, _OF_LOST_RESOURCES) or _OF_LOST_OBJECTS.search(str(cause.message)) is not None


def _is_of_transport(message: str) -> bool:
    return _OF_PYTHON not in message and _OF_TRANSPORT.search(message) is not None
