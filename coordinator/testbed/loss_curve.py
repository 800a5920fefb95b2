"""What one training has shown: the loss of each minibatch, in the order in which they were processed."""

import dataclasses
import functools
from typing import Any

import numpy as np

from coordinator.testbed.cell import Cell
from coordinator.testbed.spikes import count_spikes

# How many minibatches a smoothed loss is the mean of.
WINDOW = 10
# The share of the minibatches, at the end, whose mean loss is the final one.
FINAL_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Curve:
    """A training's losses.

    Attributes:
      cell: what was trained.
      losses: of each processed minibatch, before its gradient is applied, float64 [batches].
      mean_staleness: of the gradients that were applied, in updates.
      seconds: what the training took.
    """

    cell: Cell
    losses: Any
    mean_staleness: float
    seconds: float

    @functools.cached_property
    def smoothed(self) -> Any:
        """The mean of each minibatch's loss and of those right before it, `WINDOW` in all, float64 [batches]."""
        ends = range(1, len(self.losses) + 1)
        return np.array([np.mean(self.losses[max(end - WINDOW, 0) : end]) for end in ends])

    @functools.cached_property
    def spikes(self) -> int:
        """How often the smoothed loss has risen; see `count_spikes`."""
        return count_spikes(self.smoothed)

    @property
    def final_loss(self) -> float:
        """The mean loss of the last tenth of the minibatches."""
        return float(np.mean(self.losses[-max(round(FINAL_SHARE * len(self.losses)), 1) :]))

    def __str__(self) -> str:
        return f"{self.cell}: {self.spikes} spikes, final loss {self.final_loss:.3f}, {self.seconds:.0f} s"

    def batches_to(self, loss: float) -> int | None:
        """How many minibatches were processed until the smoothed loss was first below a loss; None if it never was."""
        below = np.flatnonzero(self.smoothed < loss)
        return int(below[0]) + 1 if below.size else None
