"""Resources with one copy per worker: iterators, datasets, tables, variables, and objects that users' functions create.

A copy is created on its worker's thread when the worker first needs it, and again after the worker was restarted. So
the loss of a worker that creates a copy is handled like any other loss, and a resource that cannot be created fails
only the closures that use it.

Tables, variables and users' resources also exist on the client, as ordinary objects that can be used, saved and
exported. A function captures the handle of the client's object. On a worker, the function gets the handle of the
worker's copy (see `PerWorkerHandles`), so that reads and look-ups are local.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.errors import ClosureCancelledError, ClosureInputError, ClosureQuarantined, WorkerLost
from coordinator.options import Options
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.membership.bounded_calls import call_within
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete
from coordinator.ps_strategy.tensorflow_internals.handles import (
    free_if_present,
    is_restored_resource,
    let_run_anywhere,
    owner_of_handle,
    resource_creator_scope,
    restored_functions,
)
from coordinator.ps_strategy.tensorflow_internals.process import context_id
from coordinator.runtime import Builds, FiniteInput
from coordinator.workers.scheduler import Scheduler

_logger = logging.getLogger("coordinator")

# Seconds between two checks for lost workers.
_POLL_INTERVAL = 0.5
# The longest wait for the first operation of this process, in seconds. The operation needs no server.
_LONGEST_CREATION = 60.0

# The client's objects that have represented copies on workers, of this strategy or of one before it.
_represent_copies: OwnedValues[bool] = OwnedValues()
# By name, the variables that represent numbers of workers, and the client that has them. All strategies of a client use
# the same variables, because TensorFlow does not trace a function again for another strategy.
_numbers: dict[str, tuple[tf.Variable, int]] = {}

# Takes the index of a worker; returns a value on which the worker's copy depends, such as its share of the data.
ShareOf = Callable[[int], Hashable]


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Where a piece of work runs, and what cancels it.

    Attributes:
      index: the worker's task index.
      device: the full name of the worker's CPU.
      calling_device: the full name of the device on which functions are called: the worker's first GPU, or its CPU.
      connection_number: the number of the connection, which changes whenever the worker has lost its state.
      constants: scalars on the worker, by value; dropped with the connection.
    """

    index: int
    device: str
    calling_device: str
    connection_number: int
    cancellation: CancellationManager
    builds: Builds
    constants: dict[bool, Any] = dataclasses.field(default_factory=dict)

    def go(self, is_open: bool) -> Any:
        """Returns a scalar on the worker that opens or closes the gate of a function; each scalar is sent only once."""
        if is_open not in self.constants:
            with tf.device(self.device):
                self.constants[is_open] = tf.constant(is_open)
        return self.constants[is_open]

    @property
    def on_cpu(self) -> "WorkerContext":
        """The same worker, for functions whose results must be on its CPU.

        If a function called on a GPU returns a dataset, the dataset and its iterators belong to the GPU, which cannot
        run the dataset's operations.
        """
        return dataclasses.replace(self, calling_device=self.device)


class _Copy(NamedTuple):
    """A worker's copy, the number of its connection (None if it is outdated), and its share."""

    value: Any = None
    connection: int | None = None
    share: Hashable = None


_NO_COPY = _Copy()


class PerWorkerResource:
    """A resource with one copy per worker.

    Args:
      name: used in messages.
      build: creates the copy of a worker; called on the worker's thread, in its device scope.
      share_of: if its result for a worker has changed and `_may_begin_again` allows it, the worker's copy is created
        again at its next use. None if no share can change; each use is then faster, because it compares no shares.
    """

    def __init__(self, name: str, build: Callable[[WorkerContext], Any], share_of: ShareOf | None = None) -> None:
        self.name = name
        self._build = build
        self._share_of = share_of
        # By worker. Only the worker's thread uses an entry.
        self.copies: dict[int, _Copy] = {}

    def value_on(self, context: WorkerContext) -> Any:
        """Returns this worker's copy, and creates it if necessary; raises ClosureInputError if that fails."""
        worker = context.index
        copy = self.copies.get(worker, _NO_COPY)
        if copy.connection == context.connection_number and (
            self._share_of is None or self._share_of(worker) == copy.share or not self._may_begin_again(worker)
        ):
            return copy.value
        self.copies.pop(worker, None)
        # The share is read before the build: if it changes during the build, the copy is built once more.
        share = None if self._share_of is None else self._share_of(worker)
        try:
            with tf.device(context.device):
                value = self._build(context)
        except (ClosureInputError, ClosureCancelledError):
            raise
        except Exception as error:
            raise ClosureInputError(
                f"{self.name} could not be created on {context.device}: {type(error).__name__}: {error}"
            ) from error
        self.copies[worker] = _Copy(value, context.connection_number, share)
        return value

    def _may_begin_again(self, worker: int) -> bool:
        """Returns whether a copy whose share has changed is created again."""
        return True

    def read_on(self, context: WorkerContext) -> Any:
        """Returns the value of this worker's copy, a variable, as NumPy."""
        with tf.device(context.device):
            return self.value_on(context).numpy()

    def recreate_on(self, context: WorkerContext) -> None:
        """Has this worker's copy created again at its next use; until then the old one stays alive."""
        if (copy := self.copies.get(context.index)) is not None:
            self.copies[context.index] = copy._replace(connection=None)

    def recreate(self) -> None:
        """Has every worker's copy created again at its next use. No function may be running."""
        self.copies.update({worker: copy._replace(connection=None) for worker, copy in self.copies.items()})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class PerWorkerHandles:
    """Maps the handles of the client's resources to the per-worker resources that they represent.

    A function captures the client's handle, even if the function is deeply nested in other functions.
    """

    def __init__(self) -> None:
        # The keys are tables, variables and handles of other resources. A table that is being loaded has no handle yet.
        self.handles_of_copies: OwnedValues[PerWorkerResource] = OwnedValues()
        self._worker_indices = PerWorkerResource("worker index", lambda context: tf.constant(context.index, tf.int64))

    @functools.cached_property
    def worker_index(self) -> tf.Tensor:
        """A placeholder for the index of the worker among the captures of a function."""
        # Created on demand, because the strategy is not connected yet when this object is created. If a function is
        # being traced when the index is demanded, the placeholder must not belong to the function's graph.
        with tf.init_scope():
            return tf.constant(-1, tf.int64)

    def add(self, owner: Any, handles_of_copies: PerWorkerResource) -> None:
        """Lets a table or variable, or the handle of another resource, represent its workers' copies while it lives."""
        self.handles_of_copies[owner] = handles_of_copies
        _represent_copies[owner] = True

    def resource_for(self, tensor: Any) -> PerWorkerResource | None:
        """Returns the resource whose copy is passed in place of a captured tensor; None to pass the tensor itself.

        Raises ValueError for a variable whose copies belong to a strategy that was closed: every worker would use the
        client's variable. The client's tables have the same contents as their copies.
        """
        if tensor is self.worker_index:
            return self._worker_indices
        owner = owner_of_handle(tensor)
        resource = self.handles_of_copies.get(tensor if owner is None else owner)
        if resource is None and isinstance(owner, tf.Variable) and owner in _represent_copies:
            raise ValueError(
                f"The variable {owner.name!r} had a value on each worker of a strategy that was closed. Create it, and "
                "the functions that use it, with the new strategy."
            )
        return resource


class WorkerCopies:
    """The library's own work with per-worker resources, scheduled before the users' functions."""

    def __init__(self, scheduler: Scheduler, options: Options) -> None:
        self._scheduler = scheduler
        self._stall_interval = options.stall_report_interval

    def create(self, resource: PerWorkerResource) -> None:
        """Has every worker create its copy, unless the resource is dropped before; does not wait for the workers."""
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
        """Runs work on every worker that is not lost, and waits until the work has ended or its worker is lost.

        Raises RuntimeError on a worker's thread, UnavailableError if a parameter server is lost, or errors of the work.
        """
        cluster = self._scheduler.cluster
        cluster.refuse_worker_thread(f"A method that has the workers {what}")
        live = [worker for worker in cluster.workers if not worker.away_seconds]
        runs = [(worker, self._scheduler.schedule_internal(worker.index, work, what)) for worker in live]
        reported = time.monotonic()
        for worker, run in runs:
            while not concurrent.futures.wait([run], _POLL_INTERVAL).done:
                if self._scheduler.queue.is_paused:
                    # Does not wait for the recovery, which may wait for variables that the caller holds.
                    for _, unfinished in runs:
                        unfinished.cancel()
                    raise tf.errors.UnavailableError(
                        None, None, f"A parameter server was lost before every worker could {what}."
                    )
                if worker.away_seconds:
                    run.cancel()
                elif time.monotonic() - reported > self._stall_interval:
                    reported = time.monotonic()
                    _logger.warning("%s is busy; waiting until it can %s.", worker.device, what)
            if not run.cancelled():
                with contextlib.suppress(WorkerLost, ClosureQuarantined):
                    run.result()

    def renew_input(self, renewed: FiniteInput) -> None:
        """Lets functions that take an input run on all workers again."""
        self._scheduler.queue.renew_input(renewed)


def create_per_worker_resource(create: Callable[[], Any], handles: PerWorkerHandles) -> Any:
    """Creates a resource on the client that represents one on each worker; see `ParameterServerStrategy`.

    `create` is called once for the client, and again for each worker, on its thread and in its device scope.
    """
    if not callable(create):
        raise TypeError(f"create_per_worker_resource takes a function that creates a resource, got {create!r}.")
    name = getattr(create, "__name__", type(create).__name__)

    def create_here() -> Any:
        with tf.device("/device:CPU:0"):
            return create()

    # A separate thread, because the caller may be in a scope that places variables on parameter servers.
    with ThreadPoolExecutor(1, "coordinator-resource") as thread:
        value = thread.submit(create_here).result()
    owners = [owner for owner, _ in _handles_in(value)]
    if not owners:
        raise TypeError(
            f"The function {name!r} was given to create_per_worker_resource, and returned {value!r}, in which there is "
            "no resource. It must return a variable, a table, a queue, a tf.random.Generator, a tensor of the dtype "
            "tf.resource, or a list, tuple, dict or tf.Module of these."
        )
    # `handle_on` uses the count, not the owners, so that the copies do not keep the value alive.
    count = len(owners)
    copies = PerWorkerResource(f"the resource of {name}", lambda _: create())

    def handle_on(place: int, context: WorkerContext) -> Any:
        on_worker = [handle for _, handle in _handles_in(copies.value_on(context))]
        if len(on_worker) != count:
            raise ValueError(f"{name!r} returned {len(on_worker)} resources there, and {count} on the client")
        return on_worker[place]

    for place, owner in enumerate(owners):
        handles.add(owner, PerWorkerResource(copies.name, functools.partial(handle_on, place)))
    return value


def _handles_in(value: Any) -> Iterator[tuple[Any, tf.Tensor]]:
    """Yields a pair for each resource in a value: the owner of its handle (or the handle itself), and the handle."""
    if isinstance(value, tf.Variable):
        yield value, value.handle
    elif isinstance(value, tf.Tensor) and value.dtype == tf.resource:
        yield value, value
    elif isinstance(value, tf.queue.QueueBase):
        free_if_present(value)
        yield value.queue_ref, value.queue_ref
    elif isinstance(value, tf.random.Generator):
        yield value.state, value.state.handle
    elif isinstance(handle := getattr(value, "resource_handle", None), tf.Tensor):
        let_run_anywhere(value)
        yield value, handle
    else:
        if isinstance(value, tf.Module):
            value = dict(sorted(vars(value).items()))
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, list | tuple | dict) else ():
            yield from _handles_in(part)


# AutoGraph would convert this function too.
@tf.autograph.experimental.do_not_convert
def get_current_worker_index() -> tf.Tensor:
    """Returns the task index of the worker that runs the function, as an int64 scalar.

    Call it in a scheduled function or a dataset function; one trace serves all workers:
    `dataset.shard(number_of_workers, coordinator.get_current_worker_index())`.

    Raises:
      RuntimeError: it was called outside of such a function.
    """
    strategy = tf.distribute.get_strategy()
    services = getattr(strategy.extended, "services", None)
    if services is None or tf.executing_eagerly():
        raise RuntimeError(
            "get_current_worker_index() is known only inside a function that is scheduled on a "
            "coordinator.ParameterServerStrategy, or inside a dataset function of one."
        )
    return services.worker_index()


def worker_number(name: str, handles: PerWorkerHandles, of: Callable[[WorkerContext], int]) -> Callable[[], tf.Tensor]:
    """Returns a function that reads, in a traced function, a number of the worker that runs the traced function.

    A variable on each worker holds the number, because TensorFlow would copy a small constant into functions that
    capture it. Functions capture the client's variable, which is created when the number is first read: most programs
    never read the number, and the first operation that TensorFlow runs in the client's own process takes long. The
    variable stays when the strategy is closed, and represents the number under the next strategy.

    `of` returns the number, which is read as an int64 scalar. `of` is called again if the worker has lost its state.
    """
    copies = PerWorkerResource(name, lambda context: tf.Variable(of(context), dtype=tf.int64, trainable=False))
    if name in _numbers:
        handles.add(_numbers[name][0], _handles_of(copies))

    def create() -> tf.Variable:
        with tf.device("/device:CPU:0"):
            return tf.Variable(-1, dtype=tf.int64, trainable=False, name=name.replace(" ", "_"))

    # AutoGraph converts all functions that a user's function calls, and warns of functions that it cannot convert.
    @tf.autograph.experimental.do_not_convert
    def read() -> tf.Tensor:
        known = _numbers.get(name)
        if known is None or known[1] != context_id():
            # Created on a thread that traces nothing and is in no scope, such as the scope of the strategy.
            variable = call_within(_LONGEST_CREATION, "coordinator-worker-number", create)
            handles.add(variable, _handles_of(copies))
            # If two threads come here at the same time, each one's variable represents the number.
            known = _numbers[name] = variable, context_id()
        return known[0].read_value()

    return read


_ReadOnAll = Callable[[PerWorkerResource], list[Any]]


def create_per_worker_variable(
    create: Callable[[], tf.Variable], handles: PerWorkerHandles, read_on_all: _ReadOnAll
) -> tf.Variable:
    """Creates a variable on the client that represents one on each worker (`per_worker_variable=True`).

    A scheduled function that captures or takes the variable reads and changes its own worker's copy. Outside of
    scheduled functions it is an ordinary variable on the client. Its additional method `read_all()` returns the current
    values of the copies: a list of tensors on the client, by worker.

    `create` is called once for the client, and again for each worker, in the worker's device scope.
    """
    return _with_copies(create, lambda _: create(), handles, read_on_all)[0]


def create_state_of_sequences(
    create: Callable[[], tf.Variable], handles: PerWorkerHandles, read_on_all: _ReadOnAll
) -> tf.Variable:
    """Creates a per-worker variable for the state that a batch leaves to the next batch of the same sequences.

    An assignment on the client, such as a layer's `reset_state()`, sets all copies. Assign while no function that uses
    the variable runs. A restarted worker begins with the assigned value again, and the log says so.
    """
    begun: set[int] = set()

    def build(context: WorkerContext) -> tf.Variable:
        if context.index in begun:
            _logger.warning(
                "%s has lost its state of %s, and begins again with what was assigned on the client: the sequences "
                "that it is in the middle of continue without what came before.",
                context.device,
                variable.name,
            )
        begun.add(context.index)
        # `create` is not called here: it may belong to a function that is being traced, if the layer is built there.
        return tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype, shape=variable.shape)

    variable, resources = _with_copies(create, build, handles, read_on_all)
    assign = variable.assign

    @functools.wraps(assign)
    def assign_to_all(*args: Any, **kwargs: Any) -> Any:
        result = assign(*args, **kwargs)
        if tf.executing_eagerly():
            begun.clear()
            for resource in resources:
                resource.recreate()
        return result

    variable.assign = assign_to_all
    return variable


def _with_copies(
    create: Callable[[], tf.Variable],
    build: Callable[[WorkerContext], tf.Variable],
    handles: PerWorkerHandles,
    read_on_all: _ReadOnAll,
) -> tuple[Any, tuple[PerWorkerResource, PerWorkerResource]]:
    """Returns a variable on the client, with the resources of its copies and of their handles."""
    with tf.device("/device:CPU:0"):
        variable = create()
    copies = PerWorkerResource(f"per-worker variable {variable.name}", build)
    of_handles = _handles_of(copies)
    handles.add(variable, of_handles)
    variable.read_all = lambda: [tf.convert_to_tensor(value, variable.dtype) for value in read_on_all(copies)]
    return variable, (copies, of_handles)


def _handles_of(copies: PerWorkerResource, attribute: str = "handle") -> PerWorkerResource:
    return PerWorkerResource(copies.name, lambda context: getattr(copies.value_on(context), attribute))


def table_creator_scopes(handles: PerWorkerHandles) -> Sequence[Any]:
    """Returns scopes in which each lookup table gets a copy on every worker.

    A copy of a `tf.lookup.StaticHashTable` is created like the table. A copy of a SavedModel's table is created by the
    functions that were saved with the table.
    """

    def create(next_creator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        table = next_creator(*args, **kwargs)
        if is_restored_resource(table):
            handles.add(table, _restored_copies(weakref.ref(table)))
        else:
            tables = PerWorkerResource("lookup table", lambda _: next_creator(*args, **kwargs))
            handles.add(table, _handles_of(tables, "resource_handle"))
        return table

    return [resource_creator_scope(kind, create) for kind in ("StaticHashTable", "RestoredStaticHashTable")]


def _restored_copies(table_ref: Callable[[], Any]) -> PerWorkerResource:
    def build(context: WorkerContext) -> tf.Tensor:
        table = table_ref()
        create, initialize = restored_functions(table)
        handle = call_concrete(create, create.captured_inputs, context.cancellation)
        captures = [handle if tensor is table.resource_handle else tensor for tensor in initialize.captured_inputs]
        call_concrete(initialize, captures, context.cancellation)
        return handle

    return PerWorkerResource("lookup table of a SavedModel", build)
