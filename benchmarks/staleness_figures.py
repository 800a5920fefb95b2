"""What was seen of trainings, and many of them in one.

It promises that nothing is averaged away: a staleness that was too high in one of the repeats is the one that is told.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A share of idle time that is larger than the one before it by less than this is noise.
NOISE = 0.05
# What a falling curve of idle shares begins and ends with, at least and at most.
IDLE_AT_FIRST, IDLE_AT_LAST = 0.3, 0.1
# Images of ten digits are guessed right so often by chance, and so much better by whoever has learnt.
CHANCE, LEARNT = 0.1, 0.85


@dataclasses.dataclass(frozen=True)
class RuleFigures:
    """What was seen of one training under a rule.

    Attributes:
      steps_per_second: steps that finished, rejected attempts not counted.
      accuracy_at_steps: on held-out images after a number of steps, from 0 to 1.
      accuracy_at_time: the same after a time.
      mean_staleness, max_staleness: of the pushed gradients, in updates.
      updates: how often the model was changed.
      rejected: the share of pushed gradients that were rejected.
      idle_shares: the part of its time that each worker waited because the rule made it wait, by worker.
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
        """Puts together the figures of a training.

        Args:
          seen: the `RuleStatistics` at its end.
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
    """The medians of some trainings' figures, and the largest of their largest staleness."""
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
    """Whether idle shares, in the order of growing delay, begin high, never rise, and end low."""
    curve = list(shares)
    never_rises = all(after <= before + NOISE for before, after in itertools.pairwise(curve))
    return curve[0] >= IDLE_AT_FIRST and curve[-1] <= IDLE_AT_LAST and never_rises


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far a training came.

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
        """Whether it knows the digits, more or less."""
        return self.loss is not None and self.accuracy >= LEARNT

    @property
    def is_lost(self) -> bool:
        """Whether it is far from knowing them."""
        return self.loss is None or self.accuracy <= (CHANCE + LEARNT) / 2


def is_rescued(synchronous: Sequence[Outcome], plain: Sequence[Outcome], modulated: Sequence[Outcome]) -> bool:
    """Whether, with every seed, plain asynchronous training is lost, and the other two are not."""
    return all(outcome.is_lost for outcome in plain) and all(
        outcome.has_learnt for outcome in (*synchronous, *modulated)
    )
