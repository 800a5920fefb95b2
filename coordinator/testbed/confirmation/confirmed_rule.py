"""The rules that are confirmed: each as the cluster has it and as the simulator has it, with the same settings."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.simulation.rules import asynchronous, bounded_delay, stale_synchronous, synchronous
from coordinator.simulation.rules.rule import Rule
from coordinator.updates.bounded_delay import BoundedDelay
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.rules.stale_synchronous import StaleSynchronous
from coordinator.updates.synchronous import Synchronous
from coordinator.updates.update_rule import UpdateRule

FREQUENCY, MAX_LEAD, MAX_DELAY = 2, 2, 3


@dataclasses.dataclass(frozen=True)
class ConfirmedRule:
    """A rule, twice.

    Attributes:
      name: what the table calls it.
      real: makes it for variables and a number of workers, in the strategy's scope.
      simulated: makes it for a number of workers.
    """

    name: str
    real: Callable[[Sequence[Any], int], UpdateRule]
    simulated: Callable[[int], Rule]


def _descend(variable: Any, gradient: Any, rate: Any) -> None:
    variable.assign_sub(rate * gradient)


def _real(kind: Callable[..., UpdateRule], variables: Sequence[Any], *settings: int) -> UpdateRule:
    return kind(_descend, variables, *settings, learning_rate=1e-6)


RULES = (
    ConfirmedRule("async", lambda variables, _: _real(Asynchronous, variables), lambda _: asynchronous.Asynchronous()),
    ConfirmedRule("sync", lambda variables, workers: _real(Synchronous, variables, workers), synchronous.Synchronous),
    ConfirmedRule(
        "SSP",
        lambda variables, _: _real(StaleSynchronous, variables, FREQUENCY, MAX_LEAD),
        lambda _: stale_synchronous.StaleSynchronous(FREQUENCY, MAX_LEAD),
    ),
    ConfirmedRule(
        "bounded delay",
        lambda variables, _: _real(BoundedDelay, variables, MAX_DELAY),
        lambda _: bounded_delay.BoundedDelay(MAX_DELAY),
    ),
)
