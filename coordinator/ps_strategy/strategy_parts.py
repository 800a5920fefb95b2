"""What a strategy is made of: the connections, the threads and the bookkeeping behind its methods.

No part may keep the strategy alive: threads refer to the parts, and a strategy that its program forgets is closed.
What few strategies need, the dashboard and evaluation, is imported when it is used: importing it would take a tenth of
the time until a strategy can be used.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from coordinator.events.json_log import log_written_as
from coordinator.future import Future
from coordinator.options import Options
from coordinator.ps_strategy.calls.client_functions import ClientFunctions
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.ps_strategy.fusing.stacked_outputs import concatenated
from coordinator.ps_strategy.keras.extended import check_backend, keras_extended
from coordinator.ps_strategy.membership.cluster_definition import ClusterDefinition
from coordinator.ps_strategy.membership.membership import Membership, ParameterServer
from coordinator.ps_strategy.membership.polled_cluster_resolver import PolledClusterResolver
from coordinator.ps_strategy.per_worker.input_shares import InputShares
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, WorkerCopies
from coordinator.ps_strategy.recovery.block_checkpoints import saved_in_blocks
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.custom_gradients import custom_gradients_freed
from coordinator.ps_strategy.tensorflow_internals.data_order import data_before_effects
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions
from coordinator.ps_strategy.tensorflow_internals.process import (
    client_environment,
    errors_explained,
    profiles_reported,
)
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import loops_differentiable
from coordinator.workers.scheduler import Scheduler

if TYPE_CHECKING:
    from coordinator.ps_strategy.dashboard_sources import UsageCounters
    from coordinator.ps_strategy.keras.strategy_evaluation import StrategyEvaluation

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class StrategyParts:
    """The parts of one strategy.

    Attributes:
      scheduler: runs closures on the workers.
      tracer: traces functions.
      handles: of the tables and variables with a copy on each worker.
      copies: has the workers create and read their copies.
      input_shares: which share of the data each worker reads.
      variables: those on the parameter servers, with the tables.
      recovery: recovers the parameter servers.
      parameter_servers: by index.
      worker_devices: those of each worker that compute, relative to it: a replica for each.
    """

    scheduler: Scheduler
    tracer: FunctionTracer
    handles: PerWorkerHandles
    copies: WorkerCopies
    input_shares: InputShares
    variables: VariableStore
    recovery: VariableRecovery
    parameter_servers: tuple[ParameterServer, ...]
    worker_devices: tuple[str, ...]

    def client_functions(
        self, extended: Any, schedule: Callable[..., Future]
    ) -> contextlib.AbstractContextManager[ClientFunctions]:
        """Returns a scope in which functions on the client may schedule.

        Args:
          extended: the strategy's hooks.
          schedule: the strategy's method, which is not kept alive.
        """
        return ClientFunctions(self.scheduler, self.tracer, extended.scheduled_tracing, schedule).open()

    def dashboard(self, address: str | None, rules: Collection[Any]) -> contextlib.AbstractContextManager[str | None]:
        """Returns a scope with a dashboard, whose URL it gives, or None if there is none.

        Args:
          address: see `Options.dashboard`; None for no dashboard.
          rules: the update rules, each with `statistics()`; those that come later, too.
        """
        if address is None:
            return contextlib.nullcontext()
        from coordinator.ps_strategy.dashboard_sources import dashboard_of

        return dashboard_of(address, self.scheduler, self.parameter_servers, rules)

    def usage_counters(self) -> "UsageCounters":
        """Returns the counters of a trace that say how busy the parameter servers are."""
        from coordinator.ps_strategy.dashboard_sources import ServerPolling, UsageCounters

        return UsageCounters(ServerPolling(self.parameter_servers))

    @functools.cached_property
    def evaluation(self) -> "StrategyEvaluation":
        """Evaluates models."""
        from coordinator.ps_strategy.keras.strategy_evaluation import StrategyEvaluation

        return StrategyEvaluation(self.scheduler.recovery.wait_recovered)

    @classmethod
    def connected(
        cls, strategy_class: type[Any], cluster_resolver: Any, options: Options, exit_stack: contextlib.ExitStack
    ) -> "StrategyParts":
        """Connects to a cluster and starts the threads.

        Args:
          strategy_class: the class of the strategy, whose models Keras is to train on the workers.
          cluster_resolver: names the servers.
          options: limits and times.
          exit_stack: receives the callbacks that close the parts.

        Raises:
          RuntimeError: Keras does not run on TensorFlow.
          Exception: what `Membership.connected` raises.
        """
        check_backend()
        exit_stack.enter_context(client_environment())
        exit_stack.enter_context(log_written_as(options.log_format))
        membership = Membership.connected(ClusterDefinition.from_resolver(cluster_resolver), options)
        unscheduled = exit_stack.enter_context(contextlib.ExitStack())
        unscheduled.callback(membership.close)
        # Left after the cluster is closed, which ends the calls of a `fit` that still runs.
        exit_stack.enter_context(keras_extended(strategy_class, options))
        owner = CheckpointOwner()
        exit_stack.enter_context(saved_in_blocks(options.checkpoint_memory, owner.record_any))
        exit_stack.enter_context(loops_differentiable())
        exit_stack.enter_context(data_before_effects())
        traced = exit_stack.enter_context(TracedFunctions().recorded())
        exit_stack.enter_context(profiles_reported(_warn_of_profile))
        exit_stack.enter_context(errors_explained())
        exit_stack.enter_context(custom_gradients_freed())
        scheduler = Scheduler(TensorFlowRuntime(membership), membership, options, concatenated)
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
        return cls(
            scheduler,
            FunctionTracer(handles),
            handles,
            WorkerCopies(scheduler, options),
            InputShares(indices(), indices if options.reshard_inputs else None),
            variables,
            recovery,
            tuple(ParameterServer(index, device, membership) for index, device in devices),
            membership.worker_devices,
        )


def _warn_of_profile(folder: str) -> None:
    _logger.warning(
        "The profile that begins shows this program alone, and not the workers and parameter servers, which compute. "
        "`coordinator profile --logdir %s HOST:PORT ...` profiles these while they train.",
        folder,
    )
