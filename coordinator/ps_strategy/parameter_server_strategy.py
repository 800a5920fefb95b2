"""The strategy, which users create, schedule functions on and join.

strategy = ParameterServerStrategy(resolver)      one client, this process
  .scope()       variables are placed on the parameter servers, round robin     ParameterServerExtended
  .schedule(fn)  traces `fn` once, queues a call; a worker runs it              FunctionTracer, Scheduler
  .join()        waits until everything has finished; raises the first error    Scheduler
  .cluster       the workers and their statistics                               Cluster
"""

import contextlib
import functools
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from coordinator.background_thread import only_here
from coordinator.errors import Rollback
from coordinator.events.event_stream import Event
from coordinator.events.trace import Trace
from coordinator.future import Future
from coordinator.options import Options, with_program_settings
from coordinator.ps_strategy.calls.client_functions import ClientFunctions
from coordinator.ps_strategy.fusing.repeated_function import stackable
from coordinator.ps_strategy.membership.cluster_definition import resolver_of
from coordinator.ps_strategy.parameter_server_extended import ParameterServerExtended
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.dataset_distribution import DatasetDistribution, DatasetFunction
from coordinator.ps_strategy.per_worker.resource import create_per_worker_resource
from coordinator.ps_strategy.sharded.creation import Partitioner, check_partitioner
from coordinator.ps_strategy.strategy_parts import StrategyParts
from coordinator.ps_strategy.tensorflow_internals.process import reset_watched

_logger = logging.getLogger("coordinator")

# The least number of frozen objects if the program has called `gc.freeze`. Python 3.12 itself freezes some hundreds.
_FROZEN_BY_PROGRAM = 10_000


class BriefCollections:
    """Base class that keeps the pauses of Python's garbage collection short.

    A full collection holds the interpreter's lock, so that no thread can send work to its worker. The collection
    searches all objects. TensorFlow and Keras have 400,000 objects, whose search takes 0.2 s. Python starts a full
    collection when the number of objects has grown by a quarter, as it does during traces. But objects of modules are
    never garbage. So this class freezes all objects that are older than its instance: Python does not search them until
    the instance ends. A frozen object is still freed with its last reference; only a frozen reference cycle is freed
    later. If the program has called `gc.freeze` itself, this class freezes nothing.

    Attributes:
      end_brief_collections: unfreezes all objects; called at the latest when the instance is garbage-collected.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Creates the object after the freeze, so that a reference cycle with the object is found."""
        is_own = gc.get_freeze_count() < _FROZEN_BY_PROGRAM
        if is_own:
            gc.freeze()
        created: Any = super().__new__(cls)
        created.end_brief_collections = weakref.finalize(created, gc.unfreeze if is_own else int)
        return created


class ParameterServerStrategy(BriefCollections, tf.distribute.Strategy):
    """Training on workers with variables on parameter servers, driven by this one program.

    Create the strategy before any variable, dataset, layer or table: objects that exist when a process connects to a
    cluster become unusable. A process has one strategy at a time. At the end of a `with` block, the strategy joins and
    closes; after an error, it only closes.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` that names the `worker` and `ps` addresses.
        With a `PolledClusterResolver` (or the function or `pathlib.Path` that it polls) or a
        `KubernetesClusterResolver`, workers may join and leave during training.
      variable_partitioner: divides large variables into parts, see docs/embeddings.md; None leaves them whole.
      options: limits and times, see `Options`.

    Attributes:
      cluster: the workers and their statistics, with methods to add, move and remove workers.
      parameter_servers: the parameter servers, by index.
      events: the stream of events that `on_event` passes to callbacks.
      dashboard_url: the address of the dashboard, with its token; None if there is no dashboard. See docs/dashboard.md.

    Raises:
      ClusterSpecError: the description of the cluster is wrong.
      TimeoutError: the parameter servers or the first worker did not answer in `options.connect_timeout`.
      RuntimeError: another strategy is open in this process, or Keras does not run on TensorFlow.
      LaunchError: another process uses the client's own port, the port of `chief` in the description.

    Source: TensorFlow RFC "Single-client Parameter Server Training" (Zhou, Chao 2020).
    """

    def __init__(
        self, cluster_resolver: Any, variable_partitioner: Partitioner | None = None, options: Options | None = None
    ) -> None:
        check_partitioner(variable_partitioner)
        options = with_program_settings(options, os.environ)
        self._cluster_resolver = cluster_resolver = resolver_of(cluster_resolver)
        with contextlib.ExitStack() as exit_stack:
            exit_stack.callback(self.end_brief_collections)
            parts = StrategyParts.connected(ParameterServerStrategy, cluster_resolver, options, exit_stack)
            self._parts, self._scheduler, self._tracer = parts, parts.scheduler, parts.tracer
            self._handles, self._recovery = parts.handles, parts.recovery
            self.parameter_servers = parts.parameter_servers
            self.cluster, self.events = parts.scheduler.cluster, parts.scheduler.queue.events
            self.cluster.schedule_with(self.schedule)
            extended = ParameterServerExtended(self, parts, variable_partitioner)
            tf.distribute.Strategy.__init__(self, extended)
            functions = ClientFunctions(parts.scheduler, parts.tracer, extended.scheduled_tracing, self.schedule)
            extended.client_functions = exit_stack.enter_context(functions.open())
            self._datasets = DatasetDistribution(
                parts.input_shares, extended.trace_dataset, parts.copies, self.num_replicas_in_sync
            )
            if options.trace is not None:
                self.trace(options.trace)
            self.dashboard_url = None
            if options.dashboard is not None:
                # The dashboard is imported here, because few programs need it.
                from coordinator.ps_strategy.dashboard_sources import dashboard_of

                dashboard = dashboard_of(options.dashboard, parts.scheduler, parts.parameter_servers, parts.rules)
                self.dashboard_url = exit_stack.enter_context(dashboard)
            close = functools.partial(_close_before_reset, weakref.ref(self))
            exit_stack.enter_context(reset_watched(close, parts.variables.forget))
            # Closes the strategy when the program no longer refers to it, and at the end of the program.
            self._closing = weakref.finalize(self, only_here(exit_stack.pop_all().close))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver with which the strategy was created."""
        return self._cluster_resolver

    def schedule(
        self,
        fn: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        worker: int | None = None,
        timeout: float | None = None,
        fetch: bool = True,
    ) -> Future:
        """Queues one call of `fn` for the next free worker; returns without waiting unless the queue is full.

        `schedule` traces the function once for each kind of arguments, in a replica context if workers have one device.
        The function runs at least once, and may run again, in part or whole: docs/guarantees.md, "What may run twice".

        Args:
          fn: a `tf.function` or concrete function.
          args: the positional arguments: tensors, NumPy arrays, Python values, per-worker iterators and datasets, and
            futures of this strategy. The function gets the results of the futures; if a future fails, so does the call.
            `schedule` copies arrays, lists and dicts, so that the program may change them afterwards.
          kwargs: the keyword arguments.
          steps: the number of runs in total, spread over the workers, with one `RunsFuture` for all: see
            docs/dispatch.md, "Many runs". None for one run.
          worker: the index of the only worker that may run the function. If this worker is lost, the function waits
            for its return (`Options.affinity_timeout`).
          timeout: in seconds. If a worker takes longer, another worker runs the function as well, and the first result
            counts. None for `Options.closure_timeout`.
          fetch: False leaves the result on the worker until `result()` is called, or a function on another worker takes
            the future. If the result is lost with its worker, it is computed again when it is needed.

        Returns:
          A `Future` of the function's result, with NumPy values for tensors. With `steps`, the values are stacked.

        Raises:
          TypeError: `fn` is not a `tf.function` or concrete function; or it returns a value that cannot leave its
            worker, such as an iterator or the handle of a variable.
          ValueError: an argument is a future, but not of this strategy; there is no worker with the index `worker`;
            `timeout` is not positive; the function has `jit_compile=True`, or calls a function with `jit_compile=True`
            that uses a remote variable; or a variable has unknown dimensions.
          TimeoutError: the queue stayed full for `Options.schedule_timeout`.
          tf.errors.OutOfRangeError: an iterator among the arguments has ended on all workers, or on `worker`.
          StrategyClosedError: the strategy is closed.
          Exception: the first error of the functions that were scheduled earlier, raised once; see `join`.
        """
        if not tf.executing_eagerly():
            settings = {"steps": steps, "worker": worker, "timeout": timeout, "fetch": fetch}
            return self.extended.on_client("schedule", fn, args, kwargs, **settings)
        call = self._tracer.cache.find(fn, args, kwargs)
        call = call or self._tracer.call_of(fn, args, kwargs, self.extended.scheduled_tracing)
        call = call if fetch else call.leaving(self._scheduler)
        call = call if steps is None else stackable(call)
        return self._scheduler.schedule(
            call,
            call.function.name,
            steps=steps,
            worker=worker,
            timeout=timeout,
            after=call.futures,
            origin=call.function,
            fusion_key=call.fusion_key,
            inputs=call.inputs,
            followers=call.followers,
        )

    def map(self, fn: Any, arguments: Iterable[Sequence[Any]]) -> list[Future]:
        """Schedules `fn` with each tuple of positional arguments; returns their futures in order."""
        return [self.schedule(fn, args) for args in arguments]

    def join(self, timeout: float | None = None) -> None:
        """Waits until every scheduled function has finished.

        The first error of a function cancels all other functions, whose futures raise `ClosureCancelledError`. The next
        `schedule`, `join` or `done` raises the first error, once; afterwards the strategy is usable again.

        Args:
          timeout: in seconds; None for no limit. A wait without progress is reported in the log.

        Raises:
          TimeoutError: functions still run after `timeout`; the message names them.
          ParameterServerLost: a parameter server was lost.
          Exception: the error of a scheduled function, with notes; `OutOfRangeError` if the function's data has ended.
        """
        if tf.executing_eagerly():
            self._scheduler.join(timeout)
        else:
            self.extended.on_client("join", timeout)

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished. Raises what `join` raises."""
        return self._scheduler.done() if tf.executing_eagerly() else self.extended.on_client("done")

    def settled(self, timeout: float | None = None) -> None:
        """Waits until everything is done that follows from what has happened: see docs/guarantees.md, "Waiting".

        A future, a count or a lost worker can be seen before the library has finished with it. Afterwards everything
        that follows has been done too: counts in all statistics, the ledger of `Epochs`, events, lines of the log, and
        callbacks of futures and of `on_event`, which have returned. Functions that run or wait now are not waited for;
        `join` does that. Neither are lost servers, nor a save in the background.

        Args:
          timeout: in seconds; None for no limit. A wait without progress is reported in the log.

        Raises:
          TimeoutError: something is not done after `timeout`; the message names who does it.
          RuntimeError: the caller is such a callback, for which it would wait.
        """
        self._scheduler.settled(timeout)

    def cancel_all(self) -> None:
        """Cancels all scheduled functions. Afterwards no function runs, and new functions can be scheduled.

        Changes that a function has made remain, iterators keep their positions, and errors that were not raised yet are
        dropped. If a call does not end within `Options.close_timeout`, the log says so, and its worker stays busy.

        Raises:
          RuntimeError: the caller is a callback of a future, on a worker's thread.
          StrategyClosedError: the strategy is closed.
        """
        self._scheduler.cancel_all()

    def quiet(self, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager. In its block no scheduled function runs, so that reads and saves are consistent.

        Entering the block waits for running functions, except for calls that `cancel_all` has given up; the log names
        these calls. Queued functions, and functions that are scheduled in the block, run after the block.

        Args:
          timeout: how long to wait for running functions, in seconds; None for no limit.

        Raises:
          TimeoutError: functions still run; the message names them.
          RuntimeError: the caller is a callback of a future, on a worker's thread.
          StrategyClosedError: the strategy is closed.
        """
        return self._scheduler.quiet(timeout)

    def restore_from(
        self, source: Any, step: Any = None, on_rollback: Callable[[Rollback], object] | None = None
    ) -> None:
        """Sets how variables are restored when a parameter server is lost; call it once the variables exist.

        When the lost server answers again, all variables and mutable tables of all parameter servers are restored from
        the latest checkpoint, in the same Python objects. A variable that is not in the checkpoint gets its initial
        value. A table that is not in the checkpoint gets the content that it had at the first `restore_from`. From now
        on the directory of the checkpoints belongs to this client; a former client can no longer save there.

        Args:
          source: `coordinator.Checkpoints` or a `tf.train.CheckpointManager`, whose newest readable checkpoint is
            restored; without a checkpoint, the initial values. Or a function that restores a checkpoint and returns its
            path. Until `restore_from` is called again, the manager saves in `quiet()` and waits for lost servers.
          step: the step in reports of recoveries: an integer variable that is in the checkpoint, such as
            `optimizer.iterations`, or a function that returns an int. None counts the functions that have finished.
          on_rollback: called with a `Rollback`, on a library thread, after each recovery that restored a checkpoint.
            The callback must not wait for functions, which run again only after the callback. A warning is logged, too.

        Raises:
          TypeError: `source`, `step` or `on_rollback` is something else.
          ValueError: the manager's checkpoint was saved with `enable_async` before.
        """
        self._recovery.restore_from(source, step, on_rollback)
        own = self._recovery
        self._scheduler.recovery.recover_with(own.try_once, own.states_held, own.missing)

    def evaluate(
        self,
        model: Any,
        data: Any,
        metrics: Sequence[Any] | None = None,
        batch_size: int | None = None,
        shards: int | None = None,
        model_state: Literal["now", "snapshot"] = "now",
    ) -> dict[str, Any]:
        """Evaluates a model on the workers; returns the results of its metrics by name. See docs/evaluation.md.

        Workers evaluate shards of the data, and the client adds up the results of the shards. So each example counts
        once, even if servers die. No variable changes.

        Args:
          model: a Keras model of this strategy; or, with `metrics`, any callable.
          data: a source of `coordinator.data`; arrays `x`, `(x, y)` or `(x, y, sample_weight)`; a finite
            `tf.data.Dataset` of such batches, which the client reads; a dataset function or a per-worker dataset.
          metrics: used in place of the metrics that the model was compiled with.
          batch_size: the batch size for arrays and sources; None for 32.
          shards: the number of parts to divide the data into; None for 4 for each worker.
          model_state: "now" reads the weights when a shard begins; "snapshot" copies them once, before all shards.

        Raises:
          ValueError: the data, a metric or the model cannot be evaluated in shards; the message says why.
        """
        return self._parts.evaluation.evaluate(self, model, data, metrics, batch_size, shards, model_state)

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Calls `callback` with each `Event` on a library thread, until the result is called: docs/events.md."""
        return self._scheduler.listeners.on_event(callback)

    def report(self, **values: Any) -> None:
        """Reports numbers, such as `loss=0.3`, to the dashboard and as events. `fit` reports its logs by itself."""
        for name, value in values.items():
            self.events.record("value_reported", name=name, detail=str(float(value)))

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Writes events to a file for the Perfetto UI, until `Trace.close` or the end of a block: docs/trace.md."""
        from coordinator.ps_strategy.dashboard_sources import ServerPolling

        return self._scheduler.trace(path, ServerPolling(self.parameter_servers).counters)

    def local_results(self, structure: Any) -> Any:
        """Waits for the futures in a structure; returns the structure with their results, None for failed futures."""
        if not tf.executing_eagerly():
            return self.extended.on_client("local_results", structure)
        return tf.nest.map_structure(self.extended.client_functions.result_or_none, structure)

    def experimental_distribute_datasets_from_function(self, dataset_fn: DatasetFunction, options: Any = None) -> Any:
        """Creates a dataset on each worker by `dataset_fn(input_context)`.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext`, returns a `tf.data.Dataset`. Traced here, run on workers.
          options: a `tf.distribute.InputOptions`; `experimental_per_replica_buffer_size` elements are prefetched.

        Raises:
          TypeError, ValueError: `dataset_fn` is not callable, returns no dataset, or creates a variable.
        """
        return self._datasets.from_function(dataset_fn, options)

    distribute_datasets_from_function = experimental_distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> PerWorkerDataset:
        """Gives each worker all of `dataset`; a shuffle without a seed gives each worker another order."""
        return self._datasets.from_dataset(dataset, options)

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> Any:
        """Creates a resource on each worker by `fn()`: a queue, a table that changes, a variable, a random generator.

        Returns the client's copy. Inside a scheduled function the same Python object is the worker's copy. A
        worker creates its copy when a function first needs the copy, and again after a restart.

        Args:
          fn: returns the resource, or a list, tuple, dict or `tf.Module` with the same number of resources each time.

        Raises:
          TypeError: `fn` is not callable, or returns no resource.
        """
        return create_per_worker_resource(fn, self._handles)

    def scope(self) -> Any:
        """Returns a scope that puts variables and mutable tables on parameter servers, other tables on every worker."""
        return contextlib.nullcontext(self) if self.extended.replica_context() else tf.distribute.Strategy.scope(self)

    def run(self, fn: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, options: Any = None) -> Any:
        """Calls `fn` on each device of a worker, in a scheduled function; returns `PerReplica`s: docs/devices.md."""
        return self.extended.across_replicas(tf.distribute.Strategy.run, fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Combines, on the worker, what `run` returned for the worker's devices; also along `axis` if not None."""
        self.extended.warn_unless_scheduled("reduce")
        return self.extended.across_replicas(tf.distribute.Strategy.reduce, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates along `axis` what `run` returned for the devices of the worker."""
        self.extended.warn_unless_scheduled("gather")
        return self.extended.across_replicas(tf.distribute.Strategy.gather, value, axis)

    def close(self) -> None:
        """Cancels all functions, ends the threads and disconnects from the servers. May be called again.

        Variables on the parameter servers are deleted. One port stays open until the process ends. In a process that
        was forked from the strategy's process, `close` does nothing.
        """
        self._closing()

    def __enter__(self) -> "ParameterServerStrategy":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.closing(self):
            if kind is None:
                self.join()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy: {len(self.parameter_servers)} ps, {self.cluster.statistics()}>"


def _close_before_reset(reference: Callable[[], ParameterServerStrategy | None]) -> None:
    strategy = reference()
    if strategy is not None:
        _logger.warning("TensorFlow is being reset, which closes the strategy: %r.", strategy)
        strategy.close()
