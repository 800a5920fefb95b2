"""The result of one trial: the loss of each minibatch, in the order in which they were processed."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from coordinator.testbed.experiment import Trial
from coordinator.testbed.step_times import Run

# The least rise of a spike, in units of the loss; guessing one of ten classes has a loss of 2.3.
HEIGHT = 0.1
# The number of minibatches over which the loss is averaged.
WINDOW = 10
# The share of the minibatches, at the end, over which the final loss is averaged.
FINAL_SHARE = 0.1


def count_spikes(losses: Iterable[float]) -> int:
    """Counts the spikes of a smoothed loss.

    A spike begins when the loss is more than `HEIGHT` above the least that it was since the last spike, and ends when
    it is more than `HEIGHT` below the spike's top. So a rise in many small steps, or one that never comes down again,
    is one spike. NaN counts as infinitely high.
    """
    count, is_up, low, top = 0, False, math.inf, -math.inf
    for loss in losses:
        value = math.inf if math.isnan(loss) else loss
        if is_up:
            top = max(top, value)
            # An infinite top is never left: the training has diverged.
            is_up, low = value >= top - HEIGHT, value
        else:
            low = min(low, value)
            is_up, top = value > low + HEIGHT, value
            count += int(is_up)
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The losses of a trial.

    Attributes:
      trial: what was trained.
      seed: of this run.
      losses: of each processed minibatch, before its gradient is applied, float64 [batches].
      times: when each of them was processed, in seconds since the first step began, float64 [batches].
      mean_staleness: of the gradients that were applied, in updates.
      seconds: the duration of the trial.
      accuracy: of the trained network on the held-out images, from 0 to 1.
      run: the times of the real steps; None if they were simulated.
    """

    trial: Trial
    seed: int
    losses: Any
    times: Any
    mean_staleness: float
    seconds: float
    accuracy: float
    run: Run | None = None

    @functools.cached_property
    def smoothed(self) -> Any:
        """The mean loss of each minibatch and those right before it, `WINDOW` in all, float64 [batches]."""
        ends = range(1, len(self.losses) + 1)
        return np.array([np.mean(self.losses[max(end - WINDOW, 0) : end]) for end in ends])

    @functools.cached_property
    def spikes(self) -> int:
        """The number of spikes of the smoothed loss; see `count_spikes`."""
        return count_spikes(self.smoothed)

    @property
    def final_loss(self) -> float:
        """The mean loss of the last tenth of the minibatches."""
        return float(np.mean(self.losses[-max(round(FINAL_SHARE * len(self.losses)), 1) :]))

    def __str__(self) -> str:
        figures = f"{self.spikes} spikes, final loss {self.final_loss:.3f}, accuracy {self.accuracy:.1%}"
        return f"{self.trial}: {figures}, {self.seconds:.0f} s"

    def batches_to(self, loss: float) -> int | None:
        """Returns the number of minibatches until the smoothed loss was first below a loss; None if it never was."""
        below = np.flatnonzero(self.smoothed < loss)
        return int(below[0]) + 1 if below.size else None

    def seconds_to(self, loss: float) -> float | None:
        """Returns the time until the smoothed loss was first below a loss, in seconds; None if it never was."""
        batches = self.batches_to(loss)
        return None if batches is None else float(self.times[batches - 1])
