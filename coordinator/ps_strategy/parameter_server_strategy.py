"""The strategy: what users make, schedule on and join.

strategy = ParameterServerStrategy(resolver)      one client, this process
  .scope()       variables go to the parameter servers, round robin     ParameterServerExtended
  .schedule(fn)  traced here, once; queued; run on some worker          Cluster
  .join()        everything scheduled has finished; raises what failed
"""

import concurrent.futures
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.cluster import Cluster
from coordinator.future import Future
from coordinator.options import Options
from coordinator.ps_strategy import keras_internals
from coordinator.ps_strategy.calls.traced_function import ResourceBuild, TracedFunction
from coordinator.ps_strategy.function_tracer import FunctionTracer
from coordinator.ps_strategy.keras_fit.fit_extension import extend_keras
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition
from coordinator.ps_strategy.membership.polled_cluster_resolver import PolledClusterResolver
from coordinator.ps_strategy.parameter_server_extended import ParameterServerExtended
from coordinator.ps_strategy.per_worker.dataset_distribution import DatasetDistribution, DatasetFunction
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker_variable import VariableRead
from coordinator.ps_strategy.recovery.variable_recovery import ParameterServerRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.scope_entered import ScopeEntered
from coordinator.ps_strategy.tensorflow_runtime import ParameterServer, TensorFlowRuntime
from coordinator.ps_strategy.worker_index import WorkerNumber
from coordinator.rolled_back import RolledBack


class ParameterServerStrategy(tf.distribute.Strategy):
    """Trains on workers with variables on parameter servers, driven by this one program.

    Make it before any variable: when this process joins its first cluster, variables made before are lost to it. One
    process has one strategy at a time; after `close()` it may make another. It is a context manager: leaving the block
    joins, then closes; leaving it by an exception closes at once.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` that names the `worker` and `ps` addresses.
        With a `PolledClusterResolver`, or a function or a `pathlib.Path` for one, workers come and go as it says.
      variable_partitioner: None. Sharded variables are not supported yet.
      options: limits and times, see `Options`.

    Raises:
      ClusterSpecError: the cluster cannot work as described.
      TimeoutError: the parameter servers or the first worker did not answer in `options.connect_timeout`.
      RuntimeError: another strategy is open in this process.

    Source: TensorFlow RFC "Single-client Parameter Server Training" (Zhou, Chao 2020).
    """

    def __init__(
        self, cluster_resolver: Any, variable_partitioner: None = None, options: Options | None = None
    ) -> None:
        if variable_partitioner is not None:
            raise ValueError("variable_partitioner must be None: sharded variables are not supported yet.")
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be a coordinator.Options, got {options!r}.")
        if callable(cluster_resolver) or isinstance(cluster_resolver, os.PathLike):
            cluster_resolver = PolledClusterResolver(cluster_resolver)
        definition = ClusterDefinition.from_resolver(cluster_resolver)
        runtime = TensorFlowRuntime(definition, options or Options())
        self._cluster_resolver = cluster_resolver
        self._handles = PerWorkerHandles()
        variables = VariableStore()
        extend_keras(ParameterServerStrategy)
        super().__init__(
            ParameterServerExtended(self, runtime.parameter_server_devices, self._handles, variables, self._read_on_all)
        )
        self.worker_index = WorkerNumber("worker index", self._handles, lambda context: context.index)
        # Grows with each connection that a worker has, so that what an abandoned call does can be told from the rest.
        self.connection_number = WorkerNumber("connection number", self._handles, lambda context: context.incarnation)
        # For names on the servers that are to be the strategy's own.
        self.numbers = itertools.count()
        self._tracer = FunctionTracer(self._handles)
        self.parameter_servers = tuple(
            ParameterServer(index, device, runtime) for index, device in enumerate(runtime.parameter_server_devices)
        )
        self._cluster = cluster = Cluster(runtime, options or Options())
        # It must not keep the strategy alive: the cluster's threads refer to it.
        self._recovery = ParameterServerRecovery(
            runtime, variables, lambda: cluster.statistics().finished, cluster.recovery.wait_recovered
        )
        self._datasets = DatasetDistribution(len(self._cluster.workers), self._trace_dataset, self._prepare)
        if isinstance(cluster_resolver, PolledClusterResolver):
            self._cluster.follow(cluster_resolver.worker_addresses, cluster_resolver.interval)
        ending = contextlib.ExitStack()
        ending.enter_context(keras_internals.rows_read_alone())
        ending.callback(self._recovery.release_manager)
        ending.callback(self._cluster.close)
        # Closes when the strategy is forgotten, and at the end of the program.
        self._closing = weakref.finalize(self, ending.close)

    @property
    def cluster(self) -> Cluster:
        """The workers and their counts."""
        return self._cluster

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was made with."""
        return self._cluster_resolver

    def schedule(
        self,
        fn: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker: int | None = None,
        timeout: float | None = None,
    ) -> Future:
        """Queues one call of `fn` for whichever worker is free, and returns at once unless the queue is full.

        The function is traced here, the first time that it meets such arguments, in a replica context: optimizers and
        metrics work in it as they are.

        It runs at least once. It may run again, in part or as a whole, if its worker is lost on the way, if it takes
        longer than `timeout`, if TensorFlow refuses the call for the moment, or if it shares a call with one that
        raises an error; see docs/dispatch.md, "What may run twice".

        Args:
          fn: a `tf.function` or concrete function.
          args: its positional arguments: tensors, NumPy arrays, Python values, per-worker iterators and datasets, and
            futures of this strategy: the function runs when they have their results, which take their place. If one of
            them fails or is cancelled, so does this function, with `ClosureInputError`.
          kwargs: its keyword arguments.
          worker: the index of the only worker that may run it. If that one is lost the function waits for its return,
            at most `Options.affinity_timeout`, and then fails with `WorkerLost`.
          timeout: in seconds; if a worker takes longer, another one runs it as well, and the first result counts.
            None stands for `Options.closure_timeout`.

        Returns:
          A `Future` of what the function returns, in its structure, as NumPy values.

        Raises:
          TypeError: `fn` is no such function.
          ValueError: a future of something else is among the arguments, there is no such worker, `timeout` is not
            positive, or XLA is to compile what it cannot (`jit_compile=True`).
          TimeoutError: the queue stayed full for `Options.schedule_timeout`.
          StrategyClosedError: the strategy is closed.
          Exception: what an earlier scheduled function raised, once; see `join`.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")
        work, futures = self._tracer.call_of(fn, args, kwargs, self._tracing)
        function = work.function
        return self._cluster.schedule(
            work, function.name, worker=worker, timeout=timeout, after=futures, origin=function
        )

    def join(self, timeout: float | None = None) -> None:
        """Waits until every scheduled function has finished.

        The first error of a scheduled function withdraws all functions that wait and cancels those that run: their
        futures raise `ClosureCancelledError`. The next `schedule`, `join` or `done` raises that error, once; then the
        strategy is ready for more.

        Args:
          timeout: in seconds; None waits as long as it takes, with a report in the log when nothing moves.

        Raises:
          TimeoutError: not in time; the message names what still runs.
          ParameterServerLost: a parameter server is gone.
          Exception: what a scheduled function raised, as itself, with notes that say which, where and when.
        """
        self._cluster.join(timeout)

    def done(self) -> bool:
        """Whether no scheduled function is pending. Raises what `join` would."""
        return self._cluster.done()

    def restore_from(
        self, source: Any, step: Any = None, on_rollback: Callable[[RolledBack], object] | None = None
    ) -> None:
        """Says where the variables come back from when a parameter server is lost; to be called once they are made.

        When its process is back at its address, all variables of all parameter servers are restored from the latest
        checkpoint, in the same Python objects; a variable that the checkpoint does not hold gets its initial value
        again. So everything is as a restarted client would find it, but nothing is traced anew, and the loop that
        schedules goes on. A checkpoint that was saved while functions ran is no snapshot: its variables are of
        different moments. For a snapshot call `join` before `manager.save()`.

        Args:
          source: a `tf.train.CheckpointManager`, whose newest checkpoint that can be read is restored, the initial
            values before there is one; or a function without arguments that restores one and returns its path. Until
            `restore_from` is called with another, `save` of the manager is one that waits for lost parameter servers
            and saves again, rather than raise what they made it raise; with
            `tf.train.CheckpointOptions(enable_async=True)` it raises `ValueError`, and so does its checkpoint.
          step: what is counted when it is told how far back a recovery went: an integer variable that is in the
            checkpoint, such as `optimizer.iterations`, or a function that returns an int. Without it, these are
            functions that have finished.
          on_rollback: called with a `RolledBack`, on a thread of the library's, after each recovery that restored a
            checkpoint; the log has a warning anyway.

        Raises:
          TypeError: `source`, `step` or `on_rollback` is something else.
          ValueError: the manager's checkpoint was saved with `enable_async` before.
        """
        self._recovery.restore_from(source, step, on_rollback)
        self._cluster.recovery.recover_with(self._recovery.try_once)

    def trace_anew(self) -> None:
        """Has each `tf.function` traced once more when it is scheduled next."""
        self._tracer.begin_anew()

    def local_results(self, structure: Any) -> Any:
        """The same structure with each future replaced by its result, waited for; None where it raised."""
        return tf.nest.map_structure(lambda leaf: _result(leaf) if isinstance(leaf, Future) else leaf, structure)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """A dataset for each worker, made there by `dataset_fn(input_context)`.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext` (the number of workers, and which of them this is), returns
            a `tf.data.Dataset`. Traced here, run on the workers. Inside a `tf.function` it is called in place.
          options: `experimental_per_replica_buffer_size` elements are prefetched on each worker.

        Raises:
          TypeError: it is not callable, or returns something else.
          ValueError: it creates a variable.
        """
        if not tf.executing_eagerly():
            return dataset_fn(tf.distribute.InputContext())
        return self._datasets.from_function(dataset_fn, options)

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """The same as `experimental_distribute_datasets_from_function`."""
        return self.experimental_distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """The whole of `dataset` for each worker, in an order of its own if it is shuffled without a seed.

        Args:
          dataset: shipped to the workers as a graph. Inside a `tf.function` it is returned as it is.
          options: as above.
        """
        return self._datasets.from_dataset(dataset, options) if tf.executing_eagerly() else dataset

    def scope(self) -> Any:
        """A scope in which variables go to the parameter servers, and lookup tables to every worker."""
        return ScopeEntered(self) if self._replica_context() is not None else tf.distribute.Strategy.scope(self)

    def run(
        self, fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, options: Any = None
    ) -> Any:
        """Calls `fn` in a replica context; meant for the inside of a scheduled function, which is in one already."""
        replica = self._replica_context()
        if replica is None:
            return tf.distribute.Strategy.run(self, fn, args, kwargs, options)
        return replica.merge_call(tf.distribute.Strategy.run, args=(fn, args, kwargs, options))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """The value, reduced along `axis` if one is given; a worker is one replica."""
        self.extended.warn_unless_scheduled("reduce")
        replica = self._replica_context()
        if replica is None:
            return tf.distribute.Strategy.reduce(self, reduce_op, value, axis)
        return replica.merge_call(tf.distribute.Strategy.reduce, args=(reduce_op, value, axis))

    def close(self) -> None:
        """Withdraws what waits, cancels what runs, ends the threads and lets the servers go. May be called again.

        Variables on the parameter servers are gone afterwards. The port on which workers call this process back stays
        open until it ends, because TensorFlow cannot close it; the next strategy uses it again.
        """
        self._closing()

    def __enter__(self) -> "ParameterServerStrategy":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.join()
        finally:
            self.close()

    def __repr__(self) -> str:
        return (
            f"<ParameterServerStrategy: {len(self.parameter_servers)} parameter servers, {self._cluster.statistics()}>"
        )

    def _trace(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedFunction:
        return self._tracer.trace(fn, args, kwargs, self._tracing)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """A scope in which functions are traced that were scheduled."""
        with self.scope(), self.extended.scheduled_tracing(), tf.distribute.ReplicaContext(self, 0):
            yield

    def _trace_dataset(self, make_dataset: Callable[[], tf.data.Dataset]) -> TracedFunction:
        with self.scope():
            return TracedFunction(tf.function(make_dataset).get_concrete_function(), self._handles)

    def _prepare(self, resource: PerWorkerResource) -> None:
        for worker in self._cluster.workers:
            self._cluster.schedule_on(worker.index, ResourceBuild(resource), f"make {resource.name}")

    def _read_on_all(self, copies: PerWorkerResource) -> list[Any]:
        reads = [
            self._cluster.schedule_on(worker.index, VariableRead(copies), f"read {copies.name}")
            for worker in self._cluster.workers
        ]
        return [read.result() for read in reads]

    def _replica_context(self) -> tf.distribute.ReplicaContext | None:
        """This strategy's replica context, if we are in one."""
        replica = tf.distribute.get_replica_context()
        return replica if replica is not None and replica.strategy is self else None


def _result(future: Future) -> Any:
    return None if _is_poisoned(future) else future.result()


def _is_poisoned(future: Future) -> bool:
    """Waits for the outcome; a future that was cancelled raises instead of telling its exception."""
    concurrent.futures.wait([future])
    return future.cancelled() or future.exception() is not None
