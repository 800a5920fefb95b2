"""The rules by the names that the command line has for them, and which of its options each of them takes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from coordinator.errors import SettingError
from coordinator.simulation.rules.asynchronous import Asynchronous
from coordinator.simulation.rules.bounded_delay import BoundedDelay
from coordinator.simulation.rules.delayed import Delayed
from coordinator.simulation.rules.model_average import ModelAverage
from coordinator.simulation.rules.rule import Rule
from coordinator.simulation.rules.stale_synchronous import StaleSynchronous
from coordinator.simulation.rules.synchronous import Synchronous

_RULES: dict[str, type[Rule]] = {
    "asynchronous": Asynchronous,
    "synchronous": Synchronous,
    "stale_synchronous": StaleSynchronous,
    "bounded_delay": BoundedDelay,
    "model_average": ModelAverage,
    "delayed": Delayed,
}
RULE_NAMES = tuple(_RULES)


def options_of(name: str) -> frozenset[str]:
    """The settings that a rule has.

    Raises:
      SettingError: there is no such rule.
    """
    return frozenset(field.name for field in dataclasses.fields(_kind(name)))


def rule_of(name: str, options: Mapping[str, Any]) -> Rule:
    """Makes a rule.

    Args:
      name: one of `RULE_NAMES`.
      options: settings of any rule; it takes those that it has.

    Raises:
      SettingError: there is no such rule, a setting that it needs is missing, or one is wrong.
    """
    kind = _kind(name)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in options:
            raise SettingError(field.name, f"must be given for the rule {name}.")
    has = options_of(name)
    return kind(**{option: value for option, value in options.items() if option in has})


def _kind(name: str) -> type[Rule]:
    if name not in _RULES:
        raise SettingError("rule", f"must be one of {', '.join(RULE_NAMES)}; got {name!r}.")
    return _RULES[name]
