"""What an update rule has seen."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.updates.state.rule_state import COUNTS, FIRST_SEEN, LAST_SEEN, WAITED, Ledger


@dataclasses.dataclass(frozen=True)
class Staleness:
    """How stale the pushed gradients were, in updates.

    Attributes:
      histogram: the number of gradients at each staleness, from 0 on; the last counts all that are beyond.
    """

    histogram: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of gradients."""
        return sum(self.histogram)

    @property
    def mean(self) -> float:
        """0 if there was no gradient."""
        return sum(staleness * count for staleness, count in enumerate(self.histogram)) / max(self.count, 1)

    @property
    def median(self) -> int:
        """The lower one, if two are in the middle."""
        return self.percentile(50)

    @property
    def p99(self) -> int:
        """What 99 of 100 gradients do not exceed."""
        return self.percentile(99)

    @property
    def max(self) -> int:
        """0 if there was no gradient."""
        return max((staleness for staleness, count in enumerate(self.histogram) if count), default=0)

    def percentile(self, percent: float) -> int:
        """The least staleness that so many of 100 gradients do not exceed; 0 if there was no gradient."""
        cumulative = np.cumsum(self.histogram)
        return int(np.searchsorted(cumulative, percent / 100 * cumulative[-1])) if self.count else 0

    def __str__(self) -> str:
        return f"staleness mean {self.mean:.2f}, median {self.median}, p99 {self.p99}, max {self.max}"


@dataclasses.dataclass(frozen=True)
class RuleStatistics:
    """What a rule had counted at one moment, over all of training, restored checkpoints included.

    All that one push counts is in it, or none of it, whatever runs meanwhile: `staleness.count` is `pushes`, with
    `Delayed` it is `updates`.

    Attributes:
      updates: how often the model was changed: its version.
      pushes: gradients that were pushed, rejected ones included.
      rejected: gradients that were not taken.
      pulls: how often a worker brought the model.
      bytes_pulled: what they brought, rows that were looked up included.
      bytes_pushed: what was sent with gradients.
      staleness: of the gradients that were pushed, rejected ones included.
      clocks: steps that each worker has finished, one for each of its pushes that was taken, by task index; without the
        workers that never were there. The clock that a rule compares may be further ahead: a worker that joins in late
        starts at the clock of the slowest, which is not counted here.
      idle_shares: the part of its time, from 0 to 1, that each worker has waited because the rule made it wait.
    """

    updates: int
    pushes: int
    rejected: int
    pulls: int
    bytes_pulled: int
    bytes_pushed: int
    staleness: Staleness
    clocks: dict[int, int]
    idle_shares: dict[int, float]

    @classmethod
    def of(cls, ledger: Ledger) -> "RuleStatistics":
        """Reads a ledger.

        Raises:
          tf.errors.OpError: its server does not answer.
        """
        found = ledger.snapshot()
        histogram, seconds, steps = found.histogram, found.seconds, found.steps
        seen = np.flatnonzero((seconds[:, FIRST_SEEN] > 0) | (steps > 0))
        lengths = np.maximum(seconds[:, LAST_SEEN] - seconds[:, FIRST_SEEN], 1e-9)
        return cls(
            **found.counts,
            staleness=Staleness(tuple(map(int, histogram[: int(histogram.nonzero()[0].max(initial=0)) + 1]))),
            clocks={int(worker): int(steps[worker]) for worker in seen},
            idle_shares={int(worker): float(min(seconds[worker, WAITED] / lengths[worker], 1.0)) for worker in seen},
        )

    def write_summaries(self, step: Any, prefix: str = "updates") -> None:
        """Writes them as TensorBoard summaries, to the default `tf.summary` writer.

        Args:
          step: an integer.
          prefix: what the names of the summaries begin with.
        """
        for name in COUNTS:
            tf.summary.scalar(f"{prefix}/{name}", getattr(self, name), step=step)
        for name in ("mean", "median", "p99", "max"):
            tf.summary.scalar(f"{prefix}/staleness/{name}", float(getattr(self.staleness, name)), step=step)
        counts = self.staleness.histogram
        tf.summary.histogram(f"{prefix}/staleness", np.repeat(np.arange(len(counts)), counts), step=step)
        for worker, share in self.idle_shares.items():
            tf.summary.scalar(f"{prefix}/idle_share/worker_{worker}", share, step=step)

    def __str__(self) -> str:
        idle = ", ".join(f"{share:.0%}" for share in self.idle_shares.values())
        return (
            f"{self.updates} updates, {self.rejected} of {self.pushes} gradients rejected, {self.staleness}; "
            f"{self.pulls} pulls; {self.bytes_pulled / 1e6:.1f} MB pulled, {self.bytes_pushed / 1e6:.1f} MB pushed; "
            f"workers idle {idle or 'never'}"
        )
