"""The figures of trainings, and their summaries.

A summary hides no repeat: its largest staleness is the largest of all repeats.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# An increase of the idle share by less than this is noise.
NOISE = 0.05
# The least idle share at the start of a falling curve, and the largest at its end.
IDLE_AT_FIRST, IDLE_AT_LAST = 0.3, 0.1
# The accuracy of guessing ten digits, and the least accuracy of a model that has learnt them.
CHANCE, LEARNT = 0.1, 0.85


@dataclasses.dataclass(frozen=True)
class RuleFigures:
    """The figures of one training under a rule.

    Attributes:
      steps_per_second: steps that finished, rejected attempts not counted.
      accuracy_at_steps: on held-out images after a number of steps, from 0 to 1.
      accuracy_at_time: the same after a time.
      mean_staleness, max_staleness: of the pushed gradients, in updates.
      updates: how often the model was changed.
      rejected: the share of pushed gradients that were rejected.
      idle_shares: the share of each worker's time that it waited because of the rule, by worker.
    """

    steps_per_second: float
    accuracy_at_steps: float
    accuracy_at_time: float
    mean_staleness: float
    max_staleness: int
    updates: int
    rejected: float
    idle_shares: tuple[float, ...]

    @classmethod
    def of(cls, seen: Any, *, steps_per_second: float, accuracies: Mapping[str, float]) -> "RuleFigures":
        """Collects the figures of a training.

        Args:
          seen: its `RuleStatistics` at the end.
          steps_per_second: as above.
          accuracies: after `steps` and after `time`.
        """
        return cls(
            steps_per_second,
            accuracies["steps"],
            accuracies["time"],
            seen.staleness.mean,
            seen.staleness.max,
            seen.updates,
            seen.rejected / max(seen.pushes, 1),
            tuple(share for _, share in sorted(seen.idle_shares.items())),
        )


def middle(figures: Sequence[RuleFigures]) -> RuleFigures:
    """Returns the medians of the figures of several trainings, and the largest of their staleness."""
    medians = {
        field.name: statistics.median(getattr(each, field.name) for each in figures)
        for field in dataclasses.fields(RuleFigures)
        if field.name not in ("max_staleness", "idle_shares")
    }
    return RuleFigures(
        **medians,
        max_staleness=max(each.max_staleness for each in figures),
        idle_shares=tuple(map(statistics.median, zip(*(each.idle_shares for each in figures), strict=True))),
    )


def is_falling_to_little(shares: Iterable[float]) -> bool:
    """Returns True if idle shares, in the order of increasing delay, begin high, never rise and end low."""
    curve = list(shares)
    never_rises = all(after <= before + NOISE for before, after in itertools.pairwise(curve))
    return curve[0] >= IDLE_AT_FIRST and curve[-1] <= IDLE_AT_LAST and never_rises


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
      loss: the mean loss of the images that were trained on; None if it was not finite.
      accuracy: on held-out images, from 0 to 1.
      mean_staleness: of the pushed gradients, in updates.
    """

    loss: float | None
    accuracy: float
    mean_staleness: float

    @property
    def has_learnt(self) -> bool:
        """True if the model has learnt the digits."""
        return self.loss is not None and self.accuracy >= LEARNT

    @property
    def is_lost(self) -> bool:
        """True if the model is far from having learnt them."""
        return self.loss is None or self.accuracy <= (CHANCE + LEARNT) / 2


def is_rescued(synchronous: Sequence[Outcome], plain: Sequence[Outcome], modulated: Sequence[Outcome]) -> bool:
    """Returns True if plain asynchronous training is lost with every seed, and the other two are not."""
    return all(outcome.is_lost for outcome in plain) and all(
        outcome.has_learnt for outcome in (*synchronous, *modulated)
    )
