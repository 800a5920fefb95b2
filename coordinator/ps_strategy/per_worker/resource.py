"""A resource with one copy per worker: an iterator, a dataset, a table, a variable.

A copy is created on its worker's thread when the worker first needs it, and created again after the worker was
restarted. So the loss of a worker while it creates a copy is handled like any other loss, and a resource that cannot be
created fails only the closures that use it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.builds import Builds
from coordinator.errors import ClosureCancelledError, ClosureInputError, ClosureQuarantined, WorkerLost
from coordinator.options import Options
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.tensorflow_internals.calls import CancellationManager
from coordinator.ps_strategy.tensorflow_internals.handles import owner_of_handle
from coordinator.runtime import FiniteInput
from coordinator.workers.scheduler import Scheduler

_logger = logging.getLogger("coordinator")

# In seconds, between two looks at whether a worker was lost.
_POLL_INTERVAL = 0.5


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Where a piece of work runs, and what cancels it.

    Attributes:
      index: the worker's task index.
      device: the full name of its CPU.
      calling_device: that of the device on which functions are called: its first GPU, or else its CPU.
      connection_number: the number of the connection, which changes whenever the worker has lost its state.
      cancellation: cancels the calls of this piece of work.
      builds: what is built in the background.
      constants: scalars on the worker, by their values; dropped with the connection.
    """

    index: int
    device: str
    calling_device: str
    connection_number: int
    cancellation: CancellationManager
    builds: Builds
    constants: dict[bool, Any] = dataclasses.field(default_factory=dict)

    def go(self, is_open: bool) -> Any:
        """Returns what opens or closes the gate of a function: a scalar on the worker, so that it is sent once."""
        if is_open not in self.constants:
            with tf.device(self.device):
                self.constants[is_open] = tf.constant(is_open)
        return self.constants[is_open]

    @property
    def on_cpu(self) -> "WorkerContext":
        """The same worker, for functions whose results must be on its CPU.

        A dataset that a function called on a GPU returns, and each iterator of it, belongs to that GPU, which cannot
        run what the dataset consists of.
        """
        return dataclasses.replace(self, calling_device=self.device)


class PerWorkerResource:
    """A resource with one copy per worker.

    Args:
      name: used in messages.
      build: creates the copy of a worker; called on the worker's thread, in its device scope.
    """

    def __init__(self, name: str, build: Callable[[WorkerContext], Any]) -> None:
        self.name = name
        self._build = build
        # Each with the number of its connection. Each entry is used by its worker's thread alone.
        self.copies: dict[int, tuple[int | None, Any]] = {}

    def value_on(self, context: WorkerContext) -> Any:
        """Returns this worker's copy, and creates it if necessary.

        Raises:
          ClosureInputError: it could not be created; the cause says why.
        """
        connection, value = self.copies.get(context.index, (None, None))
        if connection == context.connection_number:
            return value
        self.copies.pop(context.index, None)
        try:
            with tf.device(context.device):
                value = self._build(context)
        except (ClosureInputError, ClosureCancelledError):
            raise
        except Exception as error:
            raise ClosureInputError(
                f"{self.name} could not be created on {context.device}: {type(error).__name__}: {error}"
            ) from error
        self.copies[context.index] = (context.connection_number, value)
        return value

    def read_on(self, context: WorkerContext) -> Any:
        """Returns the value of this worker's copy, which is a variable, as NumPy."""
        with tf.device(context.device):
            return self.value_on(context).numpy()

    def recreate_on(self, context: WorkerContext) -> None:
        """Creates this worker's copy again at its next use; until then the old one stays alive."""
        if context.index in self.copies:
            self.copies[context.index] = None, self.copies[context.index][1]

    def recreate(self) -> None:
        """Creates every worker's copy again at its next use; to be called while no function runs."""
        self.copies.update({index: (None, copy) for index, (_, copy) in self.copies.items()})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class PerWorkerHandles:
    """Maps the handles of tables and variables on the client to the per-worker resources that they represent.

    A table or per-worker variable also exists once on the client. A function that uses it captures that object's
    handle, however deeply it is nested in other functions; when the function runs on a worker, the handle of the
    worker's copy is passed instead.
    """

    def __init__(self) -> None:
        # By the table or variable, since a table that is being loaded has no handle yet; of other resources by the
        # handle.
        self.handles_of_copies: OwnedValues[PerWorkerResource] = OwnedValues()
        self._worker_indices = PerWorkerResource("worker index", lambda context: tf.constant(context.index, tf.int64))

    @functools.cached_property
    def worker_index(self) -> tf.Tensor:
        """A placeholder for the index of the worker among the captures of a function."""
        # Made when it is needed: the strategy is not connected yet when this object is created. That may be while a
        # function is traced, to whose graph it must not belong.
        with tf.init_scope():
            return tf.constant(-1, tf.int64)

    def add(self, owner: Any, handles_of_copies: PerWorkerResource) -> None:
        """Lets a table or variable, or the handle of another resource, represent its workers' copies while it lives."""
        self.handles_of_copies[owner] = handles_of_copies

    def resource_for(self, tensor: Any) -> PerWorkerResource | None:
        """Returns what is passed instead of a captured tensor, if that depends on the worker; otherwise None."""
        if tensor is self.worker_index:
            return self._worker_indices
        owner = owner_of_handle(tensor)
        return self.handles_of_copies.get(tensor if owner is None else owner)


class WorkerCopies:
    """Schedules the library's own work with resources, before what its users have scheduled.

    Args:
      scheduler: has the workers.
      options: `stall_report_interval`.
    """

    def __init__(self, scheduler: Scheduler, options: Options) -> None:
        self._scheduler = scheduler
        self._stall_interval = options.stall_report_interval

    def create(self, resource: PerWorkerResource) -> None:
        """Makes every worker create its copy, unless the resource is dropped before; does not wait for it."""
        reference = weakref.ref(resource)

        def create(context: WorkerContext) -> None:
            if (wanted := reference()) is not None:
                wanted.value_on(context)

        for worker in self._scheduler.cluster.workers:
            self._scheduler.schedule_internal(worker.index, create, f"create {resource.name}")

    def read(self, resource: PerWorkerResource) -> list[Any]:
        """Returns the values of all copies, which are variables, in the order of the workers, as NumPy."""
        reads = [
            self._scheduler.schedule_internal(worker.index, resource.read_on, f"read {resource.name}")
            for worker in self._scheduler.cluster.workers
        ]
        return [read.result() for read in reads]

    def run_on_live(self, work: Callable[[WorkerContext], object], what: str) -> None:
        """Runs work on every worker that is not lost, and waits until it has ended there or the worker was lost.

        Raises:
          RuntimeError: on a worker's thread.
          tf.errors.UnavailableError: a parameter server was lost before.
          Exception: what the work raised.
        """
        cluster = self._scheduler.cluster
        cluster.refuse_worker_thread(f"What would {what}")
        live = [worker for worker in cluster.workers if not worker.away_seconds]
        runs = [(worker, self._scheduler.schedule_internal(worker.index, work, what)) for worker in live]
        reported = time.monotonic()
        for worker, run in runs:
            while not concurrent.futures.wait([run], _POLL_INTERVAL).done:
                if self._scheduler.queue.is_paused:
                    # The recovery may wait for what holds the variables meanwhile: the caller.
                    for _, each in runs:
                        each.cancel()
                    raise tf.errors.UnavailableError(None, None, f"A parameter server was lost before all did {what}.")
                if worker.away_seconds:
                    run.cancel()
                elif time.monotonic() - reported > self._stall_interval:
                    reported = time.monotonic()
                    _logger.warning("%s does not %s yet: it runs something else.", worker.device, what)
            if not run.cancelled():
                with contextlib.suppress(WorkerLost, ClosureQuarantined):
                    run.result()

    def renew_input(self, renewed: FiniteInput) -> None:
        """Lets functions that take an input run on all workers again."""
        self._scheduler.queue.workers.renew_input(renewed)
