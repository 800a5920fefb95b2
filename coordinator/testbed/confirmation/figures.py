"""What is compared: how stale, how fast, how idle; and what it is made of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.simulation.result import Result
from coordinator.updates.rule_statistics import Staleness


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a rule's ledger has counted in a real run.

    Attributes:
      seconds: how long the run was.
      updates: how often the model was changed.
      histogram: how many gradients there were of each staleness, int64.
      waited: what all workers together waited because the rule made them, in seconds.
    """

    seconds: float
    updates: int
    histogram: Any
    waited: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of real runs or of a simulation.

    Attributes:
      mean_staleness: of the pushed gradients, in updates.
      p99_staleness: what 99 of 100 of them do not exceed.
      updates_per_second: how often the model was changed.
      idle_share: the part of the workers' time, from 0 to 1, that they waited because the rule made them wait.
    """

    mean_staleness: float
    p99_staleness: int
    updates_per_second: float
    idle_share: float

    @classmethod
    def of_simulation(cls, result: Result) -> "Figures":
        """Those of a simulation."""
        return cls(result.mean_staleness, result.p99_staleness, result.updates_per_second, result.idle_share)

    @classmethod
    def of_runs(cls, counted: Sequence[Counted], workers: int) -> "Figures":
        """Those of real runs of so many workers, as if they were one."""
        seconds = sum(each.seconds for each in counted)
        staleness = Staleness(tuple(map(int, np.sum([each.histogram for each in counted], axis=0))))
        return cls(
            staleness.mean,
            staleness.p99,
            sum(each.updates for each in counted) / seconds,
            sum(each.waited for each in counted) / (workers * seconds),
        )
