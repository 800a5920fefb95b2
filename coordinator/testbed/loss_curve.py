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


def spikes_of(losses: Iterable[float]) -> list[float]:
    """Returns the heights of the spikes of a smoothed loss, in order.

    A spike begins when the loss is more than `HEIGHT` above the least that it was since the last spike, and ends when
    it is more than `HEIGHT` below the spike's top. So a rise in many small steps, or one that never comes down again,
    is one spike. Its height is that of its top above that least loss. NaN counts as infinitely high.
    """
    heights: list[float] = []
    is_up, low, top = False, math.inf, -math.inf
    for loss in losses:
        value = math.inf if math.isnan(loss) else loss
        if is_up:
            top = max(top, value)
            heights[-1] = top - low
            # An infinite top is never left: the training has diverged.
            if value < top - HEIGHT:
                is_up, low = False, value
        else:
            low = min(low, value)
            if value > low + HEIGHT:
                is_up, top = True, value
                heights.append(top - low)
    return heights


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
    def spike_heights(self) -> list[float]:
        """The heights of the spikes of the smoothed loss; see `spikes_of`."""
        return spikes_of(self.smoothed)

    @property
    def spikes(self) -> int:
        """The number of spikes."""
        return len(self.spike_heights)

    @property
    def rise(self) -> float:
        """The heights of all spikes together: how unstable the training was."""
        return math.fsum(self.spike_heights)

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
