"""What a rule on real servers has counted, and the difference of two such counts: what it counted in a run."""

import dataclasses
from typing import Any

from coordinator.updates.rule_statistics import Staleness
from coordinator.updates.state.rule_state import COUNTS, HISTOGRAM, STEPS, WAITED
from coordinator.updates.update_rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class RuleCounts:
    """Counts of a rule.

    Attributes:
      updates: the number of updates of the model.
      histogram: the number of gradients at each staleness, int64.
      waited: the time that all workers together waited for the rule, in seconds.
    """

    updates: int
    histogram: Any
    waited: float

    @classmethod
    def of(cls, rule: UpdateRule) -> "RuleCounts":
        """Returns what a rule has counted so far."""
        counts, seconds = (tensor.numpy() for tensor in rule.state.read())
        return cls(int(counts[COUNTS.index("updates")]), counts[HISTOGRAM:STEPS], float(seconds[:, WAITED].sum()))

    def __sub__(self, before: "RuleCounts") -> "RuleCounts":
        return RuleCounts(self.updates - before.updates, self.histogram - before.histogram, self.waited - before.waited)

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of the gradients, in updates."""
        return Staleness(tuple(map(int, self.histogram))).mean
