"""Parameter-server training with one client: variables on parameter servers, functions on workers.

    strategy = coordinator.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = ...
    future = strategy.schedule(step, args=(iterator,))
    strategy.join()

It promises that `import coordinator` costs a few milliseconds and loads neither TensorFlow nor anything else outside
the standard library: each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "ClosureCancelledError",
    "ClosureError",
    "ClosureInputError",
    "ClosureQuarantined",
    "Cluster",
    "ClusterSpecError",
    "CoordinatorError",
    "EvaluationError",
    "Future",
    "InvalidTransitionError",
    "LaunchError",
    "Options",
    "ParameterServerLost",
    "ParameterServerStrategy",
    "PolledClusterResolver",
    "RolledBack",
    "SettingError",
    "SidecarEvaluator",
    "StrategyClosedError",
    "TaskLost",
    "VersionMismatchError",
    "Worker",
    "WorkerLost",
    "__version__",
    "evaluation",
    "get_current_worker_index",
    "simulation",
    "testing",
    "updates",
]

if TYPE_CHECKING:
    from coordinator import evaluation, simulation, testing, updates
    from coordinator.cluster import Cluster
    from coordinator.errors import (
        ClosureCancelledError,
        ClosureError,
        ClosureInputError,
        ClosureQuarantined,
        ClusterSpecError,
        CoordinatorError,
        EvaluationError,
        InvalidTransitionError,
        LaunchError,
        ParameterServerLost,
        SettingError,
        StrategyClosedError,
        TaskLost,
        VersionMismatchError,
        WorkerLost,
    )
    from coordinator.evaluation.sidecar_evaluator import SidecarEvaluator
    from coordinator.future import Future
    from coordinator.options import Options
    from coordinator.ps_strategy.membership.polled_cluster_resolver import PolledClusterResolver
    from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
    from coordinator.ps_strategy.worker_index import get_current_worker_index
    from coordinator.rolled_back import RolledBack
    from coordinator.workers.worker import Worker
else:
    # Hidden from type checkers, which would otherwise accept every misspelt name as an attribute.
    _MODULE_OF_NAME = {
        "ClosureCancelledError": "coordinator.errors",
        "ClosureError": "coordinator.errors",
        "ClosureInputError": "coordinator.errors",
        "ClosureQuarantined": "coordinator.errors",
        "Cluster": "coordinator.cluster",
        "ClusterSpecError": "coordinator.errors",
        "CoordinatorError": "coordinator.errors",
        "EvaluationError": "coordinator.errors",
        "Future": "coordinator.future",
        "InvalidTransitionError": "coordinator.errors",
        "LaunchError": "coordinator.errors",
        "Options": "coordinator.options",
        "ParameterServerLost": "coordinator.errors",
        "ParameterServerStrategy": "coordinator.ps_strategy.parameter_server_strategy",
        "PolledClusterResolver": "coordinator.ps_strategy.membership.polled_cluster_resolver",
        "RolledBack": "coordinator.rolled_back",
        "SettingError": "coordinator.errors",
        "SidecarEvaluator": "coordinator.evaluation.sidecar_evaluator",
        "StrategyClosedError": "coordinator.errors",
        "TaskLost": "coordinator.errors",
        "VersionMismatchError": "coordinator.errors",
        "Worker": "coordinator.workers.worker",
        "WorkerLost": "coordinator.errors",
        "get_current_worker_index": "coordinator.ps_strategy.worker_index",
    }
    _SUBPACKAGES = ("evaluation", "simulation", "testing", "updates")

    def __getattr__(name):
        from importlib import import_module

        if name in _SUBPACKAGES:
            return import_module(f"coordinator.{name}")
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module 'coordinator' has no attribute {name!r}; its names are {', '.join(__all__)}.")
        value = getattr(import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value  # The next use of the name finds it without coming here.
        return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
