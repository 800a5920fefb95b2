"""Which rows `Table.evict` removes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.setting_checks import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class OlderThan:
    """Evicts rows that have had no gradient in the last `steps` steps of the table.

    Args:
      steps: calls of `apply_gradients`, of all workers together; at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)


@dataclasses.dataclass(frozen=True)
class SmallerThan:
    """Evicts rows whose Euclidean norm is below `norm`.

    Args:
      norm: positive. New rows have the norm that the initializer gives them.
    """

    norm: float

    def __post_init__(self) -> None:
        check_number("norm", self.norm, above=0)


Eviction = OlderThan | SmallerThan


def evicted(policies: Sequence[Eviction], rows: Callable[[], Any], ages: Any) -> Any:
    """Returns which rows at least one of the policies evicts, bool [n].

    Args:
      policies: any number.
      rows: returns the rows, float [n, dim]; called if a policy needs them.
      ages: the steps since the last gradient of each row, int64 [n].
    """
    found = tf.zeros(tf.shape(ages), tf.bool)
    for policy in policies:
        found |= ages > policy.steps if isinstance(policy, OlderThan) else tf.norm(rows(), axis=1) < policy.norm
    return found
