"""What is compared: how stale, how fast, how idle."""

import dataclasses
import statistics
from collections.abc import Sequence

from coordinator.simulation.result import Result


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one run, real or simulated.

    Attributes:
      mean_staleness: of the pushed gradients, in updates.
      p99_staleness: what 99 of 100 of them do not exceed.
      updates_per_second: how often the model was changed.
      idle_share: the part of the workers' time, from 0 to 1, that they waited because the rule made them wait.
    """

    mean_staleness: float
    p99_staleness: float
    updates_per_second: float
    idle_share: float

    @classmethod
    def of(cls, result: Result) -> "Figures":
        """Those of a simulation."""
        return cls(result.mean_staleness, result.p99_staleness, result.updates_per_second, result.idle_share)


def middle(figures: Sequence[Figures]) -> Figures:
    """The medians of several runs' figures."""
    return Figures(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, figures), strict=True)))
