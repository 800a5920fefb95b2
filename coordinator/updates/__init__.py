"""Update rules: what a pushed gradient does to the model on the parameter servers.

    with strategy.scope():
        rule = coordinator.updates.Asynchronous(optimizer, model.trainable_variables)

    with rule.pull() as version:
        ...
    accepted = rule.push(gradients, version)

Each name below is imported when it is first used; `decisions` needs no TensorFlow.
"""

from typing import TYPE_CHECKING

__all__ = [
    "Asynchronous",
    "BoundedDelay",
    "Delayed",
    "ModelAverage",
    "RuleStatistics",
    "StaleSynchronous",
    "Staleness",
    "Synchronous",
    "UpdateRule",
    "decisions",
]

if TYPE_CHECKING:
    from coordinator.updates import decisions
    from coordinator.updates.bounded_delay import BoundedDelay
    from coordinator.updates.rule_statistics import RuleStatistics, Staleness
    from coordinator.updates.rules.asynchronous import Asynchronous
    from coordinator.updates.rules.delayed import Delayed
    from coordinator.updates.rules.model_average import ModelAverage
    from coordinator.updates.rules.stale_synchronous import StaleSynchronous
    from coordinator.updates.synchronous import Synchronous
    from coordinator.updates.update_rule import UpdateRule
else:
    # Hidden from type checkers, which would otherwise accept every misspelt name as an attribute.
    _MODULE_OF_NAME = {
        "Asynchronous": "rules.asynchronous",
        "BoundedDelay": "bounded_delay",
        "Delayed": "rules.delayed",
        "ModelAverage": "rules.model_average",
        "RuleStatistics": "rule_statistics",
        "StaleSynchronous": "rules.stale_synchronous",
        "Staleness": "rule_statistics",
        "Synchronous": "synchronous",
        "UpdateRule": "update_rule",
    }

    def __getattr__(name):
        from importlib import import_module

        if name == "decisions":
            return import_module(f"{__name__}.decisions")
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}.")
        return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
