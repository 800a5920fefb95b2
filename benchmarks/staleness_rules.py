"""The update rules that are compared, with their names in the tables."""

import dataclasses
from collections.abc import Callable
from typing import Any

from coordinator import updates

WORKERS, PS = 3, 2


@dataclasses.dataclass(frozen=True)
class RuleChoice:
    """A rule with its settings.

    Attributes:
      name: its name in tables.
      make: creates it for an optimizer and variables, in the strategy's scope.
      most_staleness: the rule's bound on the staleness of a gradient; None without one.
      is_averaged: True if each worker has its own model, and `abort` averages them.
    """

    name: str
    make: Callable[[Any, Any], updates.UpdateRule]
    most_staleness: int | None = None
    is_averaged: bool = False


def bounded_delay(max_delay: int, grads_to_wait: int = 1) -> RuleChoice:
    """Returns bounded delay of `max_delay` updates."""
    return RuleChoice(
        f"bounded delay {max_delay}",
        lambda optimizer, variables: updates.BoundedDelay(
            optimizer, variables, max_delay=max_delay, grads_to_wait=grads_to_wait
        ),
        max_delay,
    )


def synchronous(grads_to_wait: int) -> RuleChoice:
    """Returns synchronous updates of `grads_to_wait` gradients; the staleness of rejected ones is counted too."""
    of = f"of {WORKERS}" if grads_to_wait <= WORKERS else "gradients"
    return RuleChoice(
        f"synchronous, {grads_to_wait} {of}",
        lambda optimizer, variables: updates.Synchronous(optimizer, variables, grads_to_wait=grads_to_wait),
    )


ASYNCHRONOUS = RuleChoice("asynchronous", updates.Asynchronous)
MODULATED = RuleChoice(
    "asynchronous, rate / staleness",
    lambda optimizer, variables: updates.Asynchronous(optimizer, variables, lr_staleness_modulation=True),
)
STALE_SYNCHRONOUS = RuleChoice(
    "stale synchronous 4, lead 8",
    lambda optimizer, variables: updates.StaleSynchronous(optimizer, variables, get_model_frequency=4, max_lead=8),
)
MODEL_AVERAGE = RuleChoice(
    "model average",
    lambda optimizer, variables: updates.ModelAverage(optimizer, variables, period=0.0),
    is_averaged=True,
)

RULES = (
    ASYNCHRONOUS,
    MODULATED,
    synchronous(WORKERS),
    synchronous(WORKERS - 1),
    STALE_SYNCHRONOUS,
    bounded_delay(0),
    bounded_delay(4),
    bounded_delay(16),
    MODEL_AVERAGE,
)
