"""A cluster in virtual time: workers, network, parameter servers and update rules as discrete events, no TensorFlow.

    from coordinator import simulation

    result = simulation.simulate(simulation.Setting(
        workers=200, ps=20, rule=simulation.BoundedDelay(8, grads_to_wait=200), compute="lognormal(50ms,0.4)"))
    print(result)

It answers, before there is a cluster, how fast one would be, how stale its gradients, how long its workers idle.
Each name below is imported when it is first used; none of them loads TensorFlow.
"""

from typing import TYPE_CHECKING

__all__ = [
    "Asynchronous",
    "BoundedDelay",
    "Constant",
    "Death",
    "Delayed",
    "Distribution",
    "Empirical",
    "Exponential",
    "Learning",
    "LogNormal",
    "LogisticRegression",
    "ModelAverage",
    "Normal",
    "Pareto",
    "Pause",
    "Problem",
    "Result",
    "Rule",
    "Setting",
    "SettingError",
    "SmallNetwork",
    "StaleSynchronous",
    "Synchronous",
    "simulate",
]

if TYPE_CHECKING:
    from coordinator.errors import SettingError
    from coordinator.simulation.absence import Death, Pause
    from coordinator.simulation.distribution import (
        Constant,
        Distribution,
        Empirical,
        Exponential,
        LogNormal,
        Normal,
        Pareto,
    )
    from coordinator.simulation.learning import Learning
    from coordinator.simulation.problem import LogisticRegression, Problem, SmallNetwork
    from coordinator.simulation.result import Result
    from coordinator.simulation.rules.asynchronous import Asynchronous
    from coordinator.simulation.rules.bounded_delay import BoundedDelay
    from coordinator.simulation.rules.delayed import Delayed
    from coordinator.simulation.rules.model_average import ModelAverage
    from coordinator.simulation.rules.rule import Rule
    from coordinator.simulation.rules.stale_synchronous import StaleSynchronous
    from coordinator.simulation.rules.synchronous import Synchronous
    from coordinator.simulation.setting import Setting
    from coordinator.simulation.simulated_cluster import simulate
else:
    # Hidden from type checkers, which would otherwise accept every misspelt name as an attribute.
    _MODULE_OF_NAME = {
        "Asynchronous": "coordinator.simulation.rules.asynchronous",
        "BoundedDelay": "coordinator.simulation.rules.bounded_delay",
        "Constant": "coordinator.simulation.distribution",
        "Death": "coordinator.simulation.absence",
        "Delayed": "coordinator.simulation.rules.delayed",
        "Distribution": "coordinator.simulation.distribution",
        "Empirical": "coordinator.simulation.distribution",
        "Exponential": "coordinator.simulation.distribution",
        "Learning": "coordinator.simulation.learning",
        "LogNormal": "coordinator.simulation.distribution",
        "LogisticRegression": "coordinator.simulation.problem",
        "ModelAverage": "coordinator.simulation.rules.model_average",
        "Normal": "coordinator.simulation.distribution",
        "Pareto": "coordinator.simulation.distribution",
        "Pause": "coordinator.simulation.absence",
        "Problem": "coordinator.simulation.problem",
        "Result": "coordinator.simulation.result",
        "Rule": "coordinator.simulation.rules.rule",
        "Setting": "coordinator.simulation.setting",
        "SettingError": "coordinator.errors",
        "SmallNetwork": "coordinator.simulation.problem",
        "StaleSynchronous": "coordinator.simulation.rules.stale_synchronous",
        "Synchronous": "coordinator.simulation.rules.synchronous",
        "simulate": "coordinator.simulation.simulated_cluster",
    }

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}.")
        return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
