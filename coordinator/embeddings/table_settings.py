"""What a table is created with, checked, and how gradients change its rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.embeddings.admission import Admission, MinCount, Probability
from coordinator.embeddings.eviction import Eviction, OlderThan, SmallerThan
from coordinator.embeddings.shard_storage import ShardStorage
from coordinator.ps_strategy.keras.internals.optimizers import is_optimizer
from coordinator.ps_strategy.keras.internals.row_optimizer import RowOptimizer
from coordinator.ps_strategy.keras.internals.stand_ins import Rows
from coordinator.setting_checks import check_integer, check_number

_WHEN_FULL = ("evict_oldest", "default_row", "error")


class FunctionUpdate:
    """A user's function `(rows, gradient)` in place of a `RowOptimizer`, whose members it has."""

    slots: Mapping[str, np.ndarray] = {}
    learning_rate: float | None = None

    def __init__(self, function: Callable[[Rows, Any], object]) -> None:
        self._function = function

    def clipped(self, gradient: Any) -> Any:
        """Returns the gradient unchanged."""
        return gradient

    def rate_at(self, step: Any) -> Any:
        """Returns None: the function has what it needs."""
        del step

    def update(self, rows: Rows, slots: Mapping[str, Rows], gradient: Any, step: Any, rate: Any) -> None:
        """Calls the function."""
        del slots, step, rate
        self._function(rows, gradient)


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """What a table is created with; see `Table`.

    Raises:
      TypeError, ValueError: one of them is wrong.
    """

    name: str
    dim: int
    capacity: int
    optimizer: Any
    initializer: Callable[[Any, int], Any]
    admission: Admission
    eviction: Sequence[Eviction]
    when_full: str
    default: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a string that is not empty, got {self.name!r}.")
        check_integer("dim", self.dim, 1)
        check_integer("capacity", self.capacity, 1)
        check_number("default", self.default)
        if not callable(self.initializer):
            raise TypeError(f"initializer must be a function (keys, dim), or None, got {self.initializer!r}.")
        if not isinstance(self.admission, MinCount | Probability):
            raise TypeError(f"admission must be MinCount(n), Probability(p) or None, got {self.admission!r}.")
        for each in self.eviction:
            if not isinstance(each, OlderThan | SmallerThan):
                raise TypeError(
                    f"eviction must be OlderThan(steps), SmallerThan(norm) or a list of them, got {each!r}."
                )
        if self.when_full not in _WHEN_FULL:
            raise ValueError(f"when_full must be one of {_WHEN_FULL}, got {self.when_full!r}.")

    @functools.cached_property
    def update(self) -> RowOptimizer | FunctionUpdate:
        """How gradients change rows.

        Raises:
          TypeError, ValueError: no such optimizer can be used.
        """
        optimizer = self.optimizer
        if is_optimizer(optimizer):
            return RowOptimizer(optimizer, self.dim)
        if not callable(optimizer) or hasattr(optimizer, "apply_gradients"):
            raise TypeError(f"optimizer must be a Keras 3 optimizer or a function (rows, gradient), got {optimizer!r}.")
        return FunctionUpdate(optimizer)

    def full_size(self, capacity: int) -> int:
        """Returns how many bytes a full part of the table takes, with room for `capacity` rows."""
        return ShardStorage.full_size(capacity, self.dim, self.update.slots, counts_waiting=self.admission.counts)
