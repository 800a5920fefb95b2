"""The result of a trial that was run several times, each time with another seed: means, and how far the runs differ."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.testbed.experiment import Trial
from coordinator.testbed.loss_curve import LossCurve


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The runs of one trial.

    Attributes:
      curves: one for each run, at least one.
    """

    curves: Sequence[LossCurve]

    @property
    def trial(self) -> Trial:
        """What was trained."""
        return self.curves[0].trial

    @functools.cached_property
    def smoothed(self) -> Any:
        """The mean of the smoothed losses, float64 [batches]."""
        return np.mean([curve.smoothed for curve in self.curves], axis=0)

    @functools.cached_property
    def times(self) -> Any:
        """The mean times of the minibatches, in seconds, float64 [batches]."""
        return np.mean([curve.times for curve in self.curves], axis=0)

    def values(self, name: str) -> list[float]:
        """Returns a figure of each run, by the name that it has in `LossCurve`."""
        return [float(getattr(curve, name)) for curve in self.curves]

    def mean(self, name: str) -> float:
        """Returns the mean of such a figure."""
        return float(np.mean(self.values(name)))

    def batches_to(self, loss: float) -> float:
        """Returns the median number of minibatches until the smoothed loss was first below a loss; `inf` for never."""
        return _median([curve.batches_to(loss) for curve in self.curves])

    def shown(self, name: str, form: str) -> str:
        """Returns the mean of a figure and the standard deviation of the runs as text, such as "0.270 ±0.004"."""
        values = self.values(name)
        # A training that has diverged has an infinite rise.
        is_spread = len(values) > 1 and np.isfinite(values).all()
        deviation = f" ±{np.std(values, ddof=1):{form}}" if is_spread else ""
        return f"{np.mean(values):{form}}{deviation}"

    def shown_until(self, reached: Callable[[LossCurve], float | None], form: str) -> str:
        """Returns the median of what runs needed, and the least and the most, as text, such as "40 (38 to never)"."""
        values = [_or_never(reached(curve)) for curve in self.curves]
        texts = [
            "never" if math.isinf(value) else f"{value:{form}}" for value in (_median(values), min(values), max(values))
        ]
        return f"{texts[0]} ({texts[1]} to {texts[2]})" if len(set(values)) > 1 else texts[0]


def results_of(curves: Sequence[LossCurve]) -> list[TrialResult]:
    """Returns the results of trials from the curves of all runs, those of a trial one after another."""
    return [TrialResult(list(group)) for _, group in itertools.groupby(curves, lambda curve: curve.trial)]


def _or_never(value: float | None) -> float:
    return math.inf if value is None else value


def _median(values: Sequence[float | None]) -> float:
    """Returns the median, of an even number the lower of the two in the middle: a mean with `inf` would be `inf`."""
    return sorted(map(_or_never, values))[(len(values) - 1) // 2]
