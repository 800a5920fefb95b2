"""The components of a strategy: the connections, the threads and the bookkeeping behind its methods.

No component may keep the strategy alive: threads refer to components, and a strategy without references is closed.
Evaluation is imported when it is first used, since its import would make the start of a strategy a tenth longer.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from coordinator.events.event_stream import EventStream, log_written_as
from coordinator.options import Options
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.ps_strategy.fusing.repeated_function import concatenated_runs
from coordinator.ps_strategy.keras.extended import check_backend, keras_extended
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition, PolledClusterResolver
from coordinator.ps_strategy.membership.membership import Membership, ParameterServer
from coordinator.ps_strategy.per_worker.dataset_distribution import InputShares
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, WorkerCopies, worker_number
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.recovery.snapshots import saved_in_blocks
from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.datasets import data_before_effects
from coordinator.ps_strategy.tensorflow_internals.functions import custom_gradients_freed
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions
from coordinator.ps_strategy.tensorflow_internals.process import (
    client_environment,
    errors_explained,
    profiles_reported,
)
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import loops_differentiable
from coordinator.versions import missing_names, unknown
from coordinator.workers.scheduler import Scheduler

if TYPE_CHECKING:
    from coordinator.ps_strategy.keras.exact_evaluation import StrategyEvaluation

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class StrategyParts:
    """The components of one strategy. Other parts of the library use `strategy.extended.services`; users do not.

    Attributes:
      copies: has the workers create and read their copies of per-worker resources.
      input_shares: which share of the data each worker reads.
      variables: the variables and tables on the parameter servers.
      parameter_servers: by index.
      worker_devices: the names of each worker's computing devices, relative to the worker; each device is a replica.
      rules: the update rules that still exist, for the dashboard.
      unique_numbers: numbers for names on the servers, so that no two objects of this strategy share a name.
      worker_index: called inside a scheduled function, returns the index of the worker that runs it.
      connection_number: called inside a scheduled function, returns a number that grows with each connection of the
        worker that runs it. Update rules tell abandoned calls from present ones by this number.
      retrace: has each `tf.function` traced again when it is scheduled next.
      add_idle_callback: see `Cluster.add_idle_callback`.
      refuse_closed: see `ClosureQueue.refuse_stopped`.
    """

    options: Options
    scheduler: Scheduler
    tracer: FunctionTracer
    handles: PerWorkerHandles
    copies: WorkerCopies
    input_shares: InputShares
    variables: VariableStore
    recovery: VariableRecovery
    parameter_servers: tuple[ParameterServer, ...]
    worker_devices: tuple[str, ...]
    events: EventStream
    rules: weakref.WeakSet[Any]
    unique_numbers: Iterator[int]
    worker_index: Callable[[], Any]
    connection_number: Callable[[], Any]
    retrace: Callable[[], None]
    add_idle_callback: Callable[[Callable[[int], object]], None]
    refuse_closed: Callable[[str], None]

    @functools.cached_property
    def evaluation(self) -> "StrategyEvaluation":
        from coordinator.ps_strategy.keras.exact_evaluation import StrategyEvaluation

        return StrategyEvaluation(self.scheduler.recovery.wait_recovered)

    @classmethod
    def connected(
        cls, strategy_class: type[Any], cluster_resolver: Any, options: Options, exit_stack: contextlib.ExitStack
    ) -> "StrategyParts":
        """Connects to a cluster and starts the threads. `exit_stack` receives the callbacks that close the parts.

        Raises RuntimeError if Keras does not run on TensorFlow, and errors of `Membership.wait_disconnected` and
        `Membership.connected`.
        """
        check_backend()
        warn_of_unknown_versions()
        Membership.wait_disconnected(options.connect_timeout)
        exit_stack.enter_context(client_environment())
        exit_stack.enter_context(log_written_as(options.log_format))
        membership = Membership.connected(ClusterDefinition.from_resolver(cluster_resolver), options)
        unscheduled = exit_stack.enter_context(contextlib.ExitStack())
        unscheduled.callback(membership.close)
        # `fit` may still run. Closing the cluster ends its calls, so this context is left after the cluster is closed.
        exit_stack.enter_context(keras_extended(strategy_class, options))
        owner = CheckpointOwner()
        exit_stack.enter_context(saved_in_blocks(options.checkpoint_memory, owner.record_any))
        exit_stack.enter_context(loops_differentiable())
        exit_stack.enter_context(data_before_effects())
        traced = exit_stack.enter_context(TracedFunctions().recorded())
        exit_stack.enter_context(profiles_reported(_warn_of_profile))
        exit_stack.enter_context(errors_explained())
        exit_stack.enter_context(custom_gradients_freed())
        scheduler = Scheduler(TensorFlowRuntime(membership), membership, options, concatenated_runs)
        exit_stack.callback(scheduler.close)
        unscheduled.pop_all()
        if isinstance(cluster_resolver, PolledClusterResolver):
            scheduler.follow(cluster_resolver.worker_addresses, cluster_resolver.interval, cluster_resolver.close)
        handles, variables = PerWorkerHandles(), VariableStore(traced)
        recovery = VariableRecovery(
            membership,
            variables,
            scheduler.queue.steps,
            scheduler.recovery.wait_recovered,
            functools.partial(scheduler.quiet, verb="save"),
            options.checkpoint_memory,
            scheduler.queue.events,
            owner,
        )
        exit_stack.callback(recovery.release_manager)

        def indices() -> list[int]:
            return [worker.index for worker in scheduler.cluster.workers]

        devices = enumerate(membership.parameter_server_devices)
        tracer = FunctionTracer(handles)
        return cls(
            options=options,
            scheduler=scheduler,
            tracer=tracer,
            handles=handles,
            copies=WorkerCopies(scheduler, options),
            input_shares=InputShares(indices(), indices if options.reshard_inputs else None),
            variables=variables,
            recovery=recovery,
            parameter_servers=tuple(ParameterServer(index, device, membership) for index, device in devices),
            worker_devices=membership.worker_devices,
            events=scheduler.queue.events,
            rules=weakref.WeakSet(),
            unique_numbers=itertools.count(),
            worker_index=worker_number("worker index", handles, lambda context: context.index),
            connection_number=worker_number("connection number", handles, lambda context: context.connection_number),
            retrace=tracer.reset,
            add_idle_callback=scheduler.cluster.add_idle_callback,
            refuse_closed=scheduler.queue.refuse_stopped,
        )


@functools.cache
def warn_of_unknown_versions() -> None:
    """Warns of newer minor versions than the tests know; does nothing when it is called again."""
    for text in unknown({"tensorflow": tf.__version__, "keras": keras.__version__}):
        _logger.warning("%s: if something is wrong, try that version first, and report what differs.", text)
        for lack in missing_private_names():
            _logger.warning("%s", lack)


def missing_private_names() -> list[str]:
    """Returns a sentence for each private name of TensorFlow or Keras that this version lacks."""
    from coordinator.ps_strategy.keras import internals  # Imported late; see `keras_extended`.

    packages = (tensorflow_internals, internals)
    modules = [part for package in packages for part in vars(package).values() if inspect.ismodule(part)]
    return missing_names(modules)


def _warn_of_profile(folder: str) -> None:
    _logger.warning(
        "The profile that begins shows this program alone, and not the workers and parameter servers, which compute. "
        "`coordinator profile --logdir %s HOST:PORT ...` profiles these while they train.",
        folder,
    )
