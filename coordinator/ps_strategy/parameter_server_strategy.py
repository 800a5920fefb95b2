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


class BriefCollections:
    """Base class that keeps the pauses of Python's garbage collection short.

    A full collection holds the interpreter's lock: during it, no thread can give its worker anything. It searches all
    objects; TensorFlow and Keras have 400,000, which takes 0.2 s. Python starts one when the number of objects has
    grown by a quarter, as it does while functions are traced. But what modules hold is never garbage. So objects that
    are older than an instance of this class are not searched until it ends. Unreachable ones are still freed, unless
    they are part of a cycle; a cycle waits. A program that has called `gc.freeze` itself is not changed.

    Attributes:
      end_brief_collections: has all objects searched again; called when the instance is forgotten, if not before.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Creates the object after the freeze: a cycle that contains it must be found."""
        is_own = gc.get_freeze_count() == 0
        if is_own:
            gc.freeze()
        created: Any = super().__new__(cls)
        created.end_brief_collections = weakref.finalize(created, gc.unfreeze if is_own else int)
        return created


class ParameterServerStrategy(BriefCollections, tf.distribute.Strategy):
    """Training on workers with variables on parameter servers, driven by this one program.

    Create it before any variable, dataset, layer or table: when a process connects to a cluster, existing ones become
    unusable. A process has one strategy at a time. As a context manager, it joins and closes at the end, and only
    closes after an error.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` that names the `worker` and `ps` addresses.
        With a `PolledClusterResolver` (or a function or `pathlib.Path` for one) or a `KubernetesClusterResolver`,
        workers may come and go during training.
      variable_partitioner: divides large variables into parts, see docs/embeddings.md; None for none.
      options: limits and times, see `Options`.

    Attributes:
      cluster: the workers, their statistics, and how to add, move and remove them.
      parameter_servers: the parameter servers, by index.
      events: what happens, as a stream, which `on_event` passes on.
      dashboard_url: the address of the dashboard, with its token; None without one. See docs/dashboard.md.

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
                # Imported when it is used, as few programs need it.
                from coordinator.ps_strategy.dashboard_sources import dashboard_of

                dashboard = dashboard_of(options.dashboard, parts.scheduler, parts.parameter_servers, parts.rules)
                self.dashboard_url = exit_stack.enter_context(dashboard)
            close = functools.partial(_close_before_reset, weakref.ref(self))
            exit_stack.enter_context(reset_watched(close, parts.variables.forget))
            # Closes when the strategy is forgotten, and at the end of the program.
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

        The function is traced here, once for each kind of arguments, in a replica context. It runs at least once, and
        may run again, in part or as a whole: see docs/guarantees.md, "What may run twice".

        Args:
          fn: a `tf.function` or concrete function.
          args: its positional arguments: tensors, NumPy arrays, Python values, per-worker iterators and datasets, and
            futures of this strategy. The function gets the results of the futures; if one fails, the function fails.
            Arrays, lists and dicts are copied here: the program may change them afterwards.
          kwargs: its keyword arguments.
          steps: run it this many times in total, spread over the workers, with one `RunsFuture`: see docs/dispatch.md,
            "Many runs".
          worker: the index of the only worker that may run it. A lost one is waited for (`Options.affinity_timeout`).
          timeout: in seconds; if a worker takes longer, another one runs it as well, and the first result counts.
            None for `Options.closure_timeout`.
          fetch: False leaves the result on the worker until `result()`, or until a function takes the future there. A
            result that is lost with its worker is computed again when it is needed.

        Returns:
          A `Future` of what the function returns, in its structure, as NumPy values; stacked with `steps`.

        Raises:
          TypeError: `fn` is not a `tf.function` or concrete function; or it returns what exists only on its worker,
            such as an iterator or the handle of a variable.
          ValueError: a future of another source is among the arguments, there is no such worker, `timeout` is not
            positive, the function has `jit_compile=True`, or calls one that has and uses a remote variable, or a
            variable has unknown dimensions.
          TimeoutError: the queue stayed full for `Options.schedule_timeout`.
          tf.errors.OutOfRangeError: an iterator among the arguments has ended on all workers, or on `worker`.
          StrategyClosedError: the strategy is closed.
          Exception: the error of an earlier scheduled function, once; see `join`.
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

        The first error of a scheduled function cancels all others, whose futures raise `ClosureCancelledError`. The
        next `schedule`, `join` or `done` raises that error, once; afterwards the strategy is usable again.

        Args:
          timeout: in seconds; None for none. A wait without progress is reported in the log.

        Raises:
          TimeoutError: not in time; the message names what still runs.
          ParameterServerLost: a parameter server was lost.
          Exception: a scheduled function's error, as itself, with notes; or `OutOfRangeError` if its data has ended.
        """
        if tf.executing_eagerly():
            self._scheduler.join(timeout)
        else:
            self.extended.on_client("join", timeout)

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished. Raises what `join` raises."""
        return self._scheduler.done() if tf.executing_eagerly() else self.extended.on_client("done")

    def cancel_all(self) -> None:
        """Cancels every scheduled function; afterwards none runs, and the strategy is ready for more.

        What a function has changed stays changed, iterators continue where they are, and errors not yet raised are
        forgotten. If a call does not end within `Options.close_timeout`, the log says so, and its worker stays busy.

        Raises:
          RuntimeError: in a callback of a future that a worker's thread runs.
          StrategyClosedError: the strategy is closed.
        """
        self._scheduler.cancel_all()

    def quiet(self, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no scheduled function runs: what is read and saved in it is of one moment.

        Entering it waits for running functions, except for calls that `cancel_all` has given up; the log names these.
        Queued functions, and functions that are scheduled in the block, run after it.

        Args:
          timeout: how long to wait for running functions, in seconds; None for no limit.

        Raises:
          TimeoutError: functions still run; the message names them.
          RuntimeError: in a callback of a future that a worker's thread runs.
          StrategyClosedError: the strategy is closed.
        """
        return self._scheduler.quiet(timeout)

    def restore_from(
        self, source: Any, step: Any = None, on_rollback: Callable[[Rollback], object] | None = None
    ) -> None:
        """Sets how variables are restored when a parameter server is lost; call it once the variables exist.

        When a server answers again, all variables and mutable tables of all parameter servers are restored from the
        latest checkpoint, in the same Python objects. Variables that are not in it get their initial values, tables
        their content at the first call. The directory of the checkpoints belongs to this client from now on; a former
        client can no longer save there.

        Args:
          source: `coordinator.Checkpoints` or a `tf.train.CheckpointManager`: its newest readable checkpoint is
            restored, or the initial values if there is none. Or a function that restores a checkpoint and returns its
            path. Until `restore_from` is called again, the manager saves in `quiet()` and waits for lost servers.
          step: counts steps in reports of recoveries: an integer variable that is in the checkpoint, such as
            `optimizer.iterations`, or a function that returns an int. None counts the functions that have finished.
          on_rollback: called with a `Rollback`, on a thread of the library, after each recovery that restored a
            checkpoint; it must not wait for functions, which run again once it has returned. A warning is logged, too.

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

        Each example counts once, even if servers die: the client adds up what the shards of the data return. No
        variable changes.

        Args:
          model: a Keras model of this strategy; or, with `metrics`, any callable.
          data: a source of `coordinator.data`; arrays `x`, `(x, y)` or `(x, y, sample_weight)`; a finite
            `tf.data.Dataset` of such batches, which the client reads; a dataset function or a per-worker dataset.
          metrics: instead of the metrics that the model was compiled with.
          batch_size: of arrays and sources; None for 32.
          shards: the number of parts to divide the data into; None for 4 for each worker.
          model_state: "now" reads the weights as they are when a shard begins, "snapshot" copies of one moment.

        Raises:
          ValueError: the data, a metric or the model cannot be evaluated in shards; the message says why.
        """
        return self._parts.evaluation.evaluate(self, model, data, metrics, batch_size, shards, model_state)

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Calls `callback` with each `Event` on a library thread; returns a function that ends this: docs/events.md."""
        return self._scheduler.listeners.on_event(callback)

    def report(self, **values: Any) -> None:
        """Reports numbers, such as `loss=0.3`, to the dashboard and as events. `fit` reports its logs by itself."""
        for name, value in values.items():
            self.events.record("value_reported", name=name, detail=str(float(value)))

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Writes what happens to a file for the Perfetto UI, until `close` or the end of a block; see docs/trace.md."""
        from coordinator.ps_strategy.dashboard_sources import ServerPolling

        return self._scheduler.trace(path, ServerPolling(self.parameter_servers).counters)

    def local_results(self, structure: Any) -> Any:
        """Waits for the futures in a structure, and returns it with their results; None where they failed."""
        if not tf.executing_eagerly():
            return self.extended.on_client("local_results", structure)
        return tf.nest.map_structure(self.extended.client_functions.result_or_none, structure)

    def experimental_distribute_datasets_from_function(self, dataset_fn: DatasetFunction, options: Any = None) -> Any:
        """Creates a dataset on each worker by `dataset_fn(input_context)`.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext`, returns a `tf.data.Dataset`. Traced here, run on workers.
          options: a `tf.distribute.InputOptions`: its `experimental_per_replica_buffer_size` elements are prefetched.

        Raises:
          TypeError, ValueError: `dataset_fn` is not callable, returns something else, or creates a variable.
        """
        return self._datasets.from_function(dataset_fn, options)

    distribute_datasets_from_function = experimental_distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> PerWorkerDataset:
        """Gives each worker all of `dataset`; a shuffle without a seed gives each worker another order."""
        return self._datasets.from_dataset(dataset, options)

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> Any:
        """Creates a resource on each worker by `fn()`: a queue, a table that changes, a variable, a random generator.

        Returns the client's copy. Inside a scheduled function the same Python object stands for the worker's copy. A
        worker creates its copy when it first needs it, and again after a restart.

        Args:
          fn: returns the resource, or a list, tuple, dict or `tf.Module` of resources, the same number at each call.

        Raises:
          TypeError: `fn` is not callable, or returns no resource.
        """
        return create_per_worker_resource(fn, self._handles)

    def scope(self) -> Any:
        """Returns a scope for variables and mutable tables on parameter servers, and other tables on every worker."""
        return contextlib.nullcontext(self) if self.extended.replica_context() else tf.distribute.Strategy.scope(self)

    def run(self, fn: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, options: Any = None) -> Any:
        """Calls `fn` on each device of a worker, in a scheduled function; returns `PerReplica`s: docs/devices.md."""
        return self.extended.across_replicas(tf.distribute.Strategy.run, fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Combines what `run` returned for the devices of the worker, on it; along `axis` too if one is given."""
        self.extended.warn_unless_scheduled("reduce")
        return self.extended.across_replicas(tf.distribute.Strategy.reduce, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates what `run` returned for the devices of the worker along `axis`."""
        self.extended.warn_unless_scheduled("gather")
        return self.extended.across_replicas(tf.distribute.Strategy.gather, value, axis)

    def close(self) -> None:
        """Cancels all functions, ends the threads and disconnects from the servers. May be called again.

        Variables on the parameter servers are deleted. One port stays open until the process ends. Does nothing in a
        process that was forked from the process that made the strategy.
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
