"""The results of trials: loss curves, means over several runs, and a comparison with a paper's findings.

"Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect" finds that more delay or more workers make
training less stable and slower, and that without delay synchronous and asynchronous training are much the same.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from coordinator.testbed.experiment import ASYNCHRONOUS, AXES, SYNCHRONOUS, Trial, delay_text, mean_delay, worker_count
from coordinator.testbed.step_times import Run

# The least rise of a spike, in units of the loss; guessing one of ten classes has a loss of 2.3.
HEIGHT = 0.1
# The number of minibatches over which the loss is averaged.
WINDOW = 10
# The share of the minibatches, at the end, over which the final loss is averaged.
FINAL_SHARE = 0.1


def spikes_of(losses: Iterable[float]) -> list[float]:
    """Returns the heights of the spikes of a smoothed loss, in order.

    A spike begins when the loss is more than `HEIGHT` above its minimum since the last spike, and ends when it is more
    than `HEIGHT` below the spike's top. So a rise in many small steps is one spike, and so is a rise that is never
    followed by a fall. The height of a spike is its top minus the minimum before it. NaN counts as infinitely high.
    """
    heights: list[float] = []
    is_up, low, top = False, math.inf, -math.inf
    for loss in losses:
        value = math.inf if math.isnan(loss) else loss
        if is_up:
            top = max(top, value)
            heights[-1] = top - low
            # After an infinite top the loss stays infinite, because the training has diverged.
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
      seed: the seed of this run.
      losses: the loss of each processed minibatch, before its gradient is applied, float64 [batches].
      times: when each minibatch was processed, in seconds since the first step began, float64 [batches].
      mean_staleness: the mean staleness of the applied gradients, in updates.
      seconds: the duration of the trial.
      accuracy: the accuracy of the trained network on the held-out images, from 0 to 1.
      run: the times of the real steps; None if the steps were simulated.
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
        """The mean loss of each minibatch and the minibatches right before it, `WINDOW` in all, float64 [batches]."""
        ends = range(1, len(self.losses) + 1)
        return np.array([np.mean(self.losses[max(end - WINDOW, 0) : end]) for end in ends])

    @functools.cached_property
    def spike_heights(self) -> list[float]:
        """The heights of the spikes of the smoothed loss; see `spikes_of`."""
        return spikes_of(self.smoothed)

    @property
    def spikes(self) -> int:
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


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The runs of one trial; `curves` has the loss curve of each run."""

    curves: Sequence[LossCurve]

    @property
    def trial(self) -> Trial:
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
        """Returns a figure of each run, by its name in `LossCurve`."""
        return [float(getattr(curve, name)) for curve in self.curves]

    def mean(self, name: str) -> float:
        return float(np.mean(self.values(name)))

    def batches_to(self, loss: float) -> float:
        """Returns the median number of minibatches until the smoothed loss was first below a loss; `inf` for never."""
        return _median([curve.batches_to(loss) for curve in self.curves])

    def shown(self, name: str, form: str) -> str:
        """Returns the mean of a figure and the runs' standard deviation as text, such as "0.270 ±0.004"."""
        values = self.values(name)
        # The rise of a diverged training is infinite.
        is_spread = len(values) > 1 and np.isfinite(values).all()
        deviation = f" ±{np.std(values, ddof=1):{form}}" if is_spread else ""
        return f"{np.mean(values):{form}}{deviation}"

    def shown_until(self, reached: Callable[[LossCurve], float | None], form: str) -> str:
        """Returns the median, least and greatest need of the runs as text, such as "40 (38 to never)"."""
        values = [reached(curve) for curve in self.curves]
        numbers = [math.inf if value is None else value for value in values]
        median, least, most = (
            "never" if math.isinf(value) else f"{value:{form}}"
            for value in (_median(values), min(numbers), max(numbers))
        )
        return f"{median} ({least} to {most})" if len(set(numbers)) > 1 else median


def results_of(curves: Sequence[LossCurve]) -> list[TrialResult]:
    """Returns the result of each trial from the curves of all runs. The curves of one trial must be consecutive."""
    return [TrialResult(list(group)) for _, group in itertools.groupby(curves, lambda curve: curve.trial)]


def _median(values: Sequence[float | None]) -> float:
    """Returns the median; None counts as `inf`. Of two middle values, the lower one counts: their mean may be `inf`."""
    return sorted(math.inf if value is None else value for value in values)[(len(values) - 1) // 2]


@dataclasses.dataclass(frozen=True)
class Steadiness:
    """The effect of an axis on otherwise equal trainings: for each value, the mean rise in nats, and mean final loss.

    `trainings` is the number of trainings with each value; `values` are in the order of the grid.
    """

    axis: str
    values: tuple[Any, ...]
    rises: tuple[float, ...]
    final_losses: tuple[float, ...]
    trainings: int

    @property
    def effect(self) -> float:
        """The difference between the largest and the smallest rise, in nats."""
        return 0.0 if math.inf == min(self.rises) else max(self.rises) - min(self.rises)

    def __str__(self) -> str:
        values = [value if isinstance(value, str) else f"{value:g}" for value in self.values]
        rises = ", ".join(f"{rise:.2f}" for rise in self.rises)
        losses = ", ".join(f"{loss:.3f}" for loss in self.final_losses)
        return (
            f"{self.axis.replace('_', ' ')}: steadiest with {values[int(np.argmin(self.rises))]}: rise {rises} with "
            f"{', '.join(values)}; final loss {losses}; means of {self.trainings} trainings each"
        )


def steadiness(results: Sequence[TrialResult]) -> list[Steadiness]:
    """Compares the values of each axis that has several in the grid; the axis with the largest effect is first.

    Otherwise equal trainings count for an axis only if there is a training with each value of the axis.
    """
    found = []
    for axis in AXES:
        values = tuple(dict.fromkeys(getattr(each.trial.descent, axis) for each in results))
        if len(values) < 2:
            continue
        # All other settings of a training -> value of the axis -> result.
        groups: dict[Any, dict[Any, TrialResult]] = {}
        for each in results:
            trial = each.trial
            rest = tuple(getattr(trial.descent, name) for name in AXES if name != axis)
            groups.setdefault((trial.mode, trial.workers, trial.delay, rest), {})[getattr(trial.descent, axis)] = each
        whole = [group for group in groups.values() if len(group) == len(values)]
        if whole:
            rises, losses = (
                tuple(float(np.mean([group[value].mean(figure) for group in whole])) for value in values)
                for figure in ("rise", "final_loss")
            )
            found.append(Steadiness(axis, values, rises, losses, len(whole)))
    return sorted(found, key=lambda each: -each.effect)


# The share of the pairs of a rising series that must be in order.
_IN_ORDER = 0.75
# Trainings are about the same up to this factor between their batches, and this difference of their final losses.
_SIMILAR_FACTOR, _SIMILAR_LOSS = 1.5, 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """A part of the grid in which a finding was checked, with the measured figures in words."""

    agrees: bool
    figures: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding of the paper, and the cases where it was checked; none if the grid has no trials for it."""

    claim: str
    cases: tuple[Case, ...]

    @property
    def verdict(self) -> str:
        """One of `agrees`, `agrees in K of N cases`, `does not agree`, and `cannot be told from this grid`."""
        agreeing = sum(case.agrees for case in self.cases)
        if not self.cases:
            return "cannot be told from this grid"
        if agreeing == len(self.cases):
            return "agrees"
        return f"agrees in {agreeing} of {len(self.cases)} cases" if agreeing else "does not agree"

    def __str__(self) -> str:
        cases = [f"  {case.figures}{'' if case.agrees else '  <- not so'}" for case in self.cases]
        return "\n".join([f"{self.claim}: {self.verdict}", *cases])


# Findings that a value rises along an axis: the finding in words, the axis, and the value.
_RISING = (
    ("more delay, more instability", "delay", "rise"),
    ("more delay, slower convergence", "delay", "batches"),
    ("more workers, more instability", "workers", "rise"),
    ("more workers, slower convergence", "workers", "batches"),
)


def findings(results: Sequence[TrialResult], target: float) -> list[Finding]:
    """Checks all findings on the results of all trials; `target` is the loss that counts as learned.

    Each optimizer, learning rate, weight decay and batch size has its own cases.
    """
    cases: dict[str, list[Case]] = {claim: [] for claim, _, _ in _RISING}
    similar: list[Case] = []
    cases["no delay, synchronous and asynchronous about the same"] = similar
    for descent in dict.fromkeys(each.trial.descent for each in results):
        of_descent = [each for each in results if each.trial.descent == descent]
        name = f"{descent.text}; " if descent.text else ""
        for claim, along, what in _RISING:
            cases[claim] += _rising_cases(name, of_descent, along, what, target)
        similar += _similarity(name, of_descent, target)
    return [Finding(claim, tuple(of_claim)) for claim, of_claim in cases.items()]


def is_rising(values: Sequence[float]) -> bool:
    """Returns whether numbers rise: the last is above the first, and at least three quarters of the pairs are in order.

    A pair of equal numbers counts as half in order.
    """
    pairs = [(before, after) for place, after in enumerate(values) for before in values[:place]]
    in_order = sum(1.0 if before < after else 0.5 * (before == after) for before, after in pairs)
    return bool(pairs) and values[-1] > values[0] and in_order >= _IN_ORDER * len(pairs)


def _rising_cases(name: str, results: Sequence[TrialResult], along: str, what: str, target: float) -> Iterable[Case]:
    """Checks whether a value of asynchronous trials rises with the delay or with the number of workers.

    `along` is "delay" or "workers"; `what` is "rise" or "batches", the name of the value. Yields a case for each series
    of more than one trial, in which only `along` varies. Along the workers, trials without delay are left out.
    """
    places: dict[str, Callable[[Trial], float]] = {
        "delay": lambda trial: mean_delay(trial.delay),
        "workers": lambda trial: trial.workers,
    }
    group = "workers" if along == "delay" else "delay"
    found = [each for each in results if each.trial.mode == ASYNCHRONOUS and places[group](each.trial) > 0]
    found.sort(key=lambda each: (places[group](each.trial), places[along](each.trial)))
    for key, series in itertools.groupby(found, lambda each: getattr(each.trial, group)):
        values = {
            getattr(each.trial, along): each.mean("rise") if what == "rise" else each.batches_to(target)
            for each in series
        }
        if len(values) > 1:
            of, unit = (worker_count(key), "s") if along == "delay" else (f"delay {delay_text(key)} s", "workers")
            if what == "rise":
                shown = f"rise {', '.join(f'{value:.2f}' for value in values.values())}"
            else:
                shown = f"{', '.join(map(_count, values.values()))} batches"
            text = f"{name}{of}: {shown} with {', '.join(map(delay_text, values))} {unit}"
            yield Case(is_rising(list(values.values())), text)


def _similarity(name: str, results: Sequence[TrialResult], target: float) -> Iterable[Case]:
    by_trial = {each.trial: each for each in results}
    for trial in sorted(by_trial, key=lambda trial: trial.workers):
        other = by_trial.get(Trial(ASYNCHRONOUS, trial.workers, 0.0, trial.descent))
        if trial.mode != SYNCHRONOUS or other is None:
            continue
        batches = [each.batches_to(target) for each in (by_trial[trial], other)]
        losses = [each.mean("final_loss") for each in (by_trial[trial], other)]
        known = [count for count in batches if not math.isinf(count)]
        is_as_quick = len(known) != 1 and max(known, default=1) <= _SIMILAR_FACTOR * min(known, default=1)
        is_as_good = abs(losses[0] - losses[1]) <= _SIMILAR_LOSS
        figures = f"{' and '.join(map(_count, batches))} batches, final loss {losses[0]:.3f} and {losses[1]:.3f}"
        yield Case(is_as_quick and is_as_good, f"{name}{worker_count(trial.workers)}: {figures}")


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.4g}"
