"""Compares the measured loss curves with the findings of a paper.

"Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect" finds that more delay makes training less
stable and slower, that more workers do so too, and that without delay synchronous and asynchronous training are about
the same.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from coordinator.testbed.experiment import ASYNCHRONOUS, SYNCHRONOUS, Trial, delay_text, worker_count
from coordinator.testbed.trial_result import TrialResult

# The share of the pairs of a series that must be in order for it to count as rising.
_IN_ORDER = 0.75
# The largest differences that count as about the same: a factor of the batches, and a difference of final losses.
_SIMILAR_FACTOR, _SIMILAR_LOSS = 1.5, 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One part of the grid in which a finding was checked.

    Attributes:
      agrees: whether the finding holds there.
      figures: the measured figures, in words.
    """

    agrees: bool
    figures: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding of the paper, and whether it holds here.

    Attributes:
      claim: the finding.
      cases: where it was checked; empty if the grid has no trials for it.
    """

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


def findings(results: Sequence[TrialResult], target: float) -> list[Finding]:
    """Checks all findings.

    Args:
      results: one for each trial.
      target: the loss that counts as learned.
    """

    def rise(result: TrialResult) -> float:
        return result.mean("rise")

    def slowness(result: TrialResult) -> float:
        return result.batches_to(target)

    claims: dict[str, Callable[[Sequence[TrialResult]], tuple[Case, ...]]] = {
        "more delay, more instability": lambda of: _rising_cases(of, "delay", "rise", rise),
        "more delay, slower convergence": lambda of: _rising_cases(of, "delay", "batches", slowness),
        "more workers, more instability": lambda of: _rising_cases(of, "workers", "rise", rise),
        "more workers, slower convergence": lambda of: _rising_cases(of, "workers", "batches", slowness),
        "no delay, synchronous and asynchronous about the same": lambda of: _similarity(of, target),
    }
    return [Finding(claim, _with_each_descent(results, cases_of)) for claim, cases_of in claims.items()]


def _with_each_descent(
    results: Sequence[TrialResult], cases_of: Callable[[Sequence[TrialResult]], tuple[Case, ...]]
) -> tuple[Case, ...]:
    """Returns the cases of the results with each optimizer, learning rate, weight decay and batch size."""
    found = []
    for descent in dict.fromkeys(each.trial.descent for each in results):
        name = f"{descent.text}; " if descent.text else ""
        cases = cases_of([each for each in results if each.trial.descent == descent])
        found += [dataclasses.replace(case, figures=name + case.figures) for case in cases]
    return tuple(found)


def is_rising(values: Sequence[float]) -> bool:
    """Returns True if numbers rise on the whole: the last is above the first, and three of four pairs are in order.

    A pair of equal numbers counts as half in order.
    """
    pairs = [(before, after) for place, after in enumerate(values) for before in values[:place]]
    in_order = sum(1.0 if before < after else 0.5 * (before == after) for before, after in pairs)
    return bool(pairs) and values[-1] > values[0] and in_order >= _IN_ORDER * len(pairs)


def _rising_cases(
    results: Sequence[TrialResult], along: str, what: str, value: Callable[[TrialResult], float]
) -> tuple[Case, ...]:
    """Checks whether a value of asynchronous trials rises: with the delay for each number of workers, or the reverse.

    Args:
      results: one for each trial.
      along: "delay" or "workers".
      what: "rise" or "batches", the name of the value.
      value: computes it.

    Returns:
      A case for each series of more than one trial. Trials without delay are no series along the workers.
    """
    group = "workers" if along == "delay" else "delay"
    found = [each for each in results if each.trial.mode == ASYNCHRONOUS and _place(each.trial, group) > 0]
    found.sort(key=lambda each: (_place(each.trial, group), _place(each.trial, along)))
    cases = []
    for key, series in itertools.groupby(found, lambda each: getattr(each.trial, group)):
        values = {getattr(each.trial, along): value(each) for each in series}
        if len(values) > 1:
            name, unit = (worker_count(key), "s") if along == "delay" else (f"delay {delay_text(key)} s", "workers")
            shown = _rises(values.values()) if what == "rise" else f"{', '.join(map(_count, values.values()))} {what}"
            places = ", ".join(map(delay_text, values))
            cases.append(Case(is_rising(list(values.values())), f"{name}: {shown} with {places} {unit}"))
    return tuple(cases)


def _place(trial: Trial, along: str) -> float:
    return trial.mean_delay if along == "delay" else trial.workers


def _similarity(results: Sequence[TrialResult], target: float) -> tuple[Case, ...]:
    by_trial = {each.trial: each for each in results}
    return tuple(
        _similarity_case(trial.workers, by_trial[trial], by_trial[other], target)
        for trial in sorted(by_trial, key=lambda trial: trial.workers)
        if trial.mode == SYNCHRONOUS and (other := Trial(ASYNCHRONOUS, trial.workers, 0.0, trial.descent)) in by_trial
    )


def _similarity_case(workers: int, synchronous: TrialResult, asynchronous: TrialResult, target: float) -> Case:
    batches = [each.batches_to(target) for each in (synchronous, asynchronous)]
    losses = [each.mean("final_loss") for each in (synchronous, asynchronous)]
    known = [count for count in batches if not math.isinf(count)]
    is_as_quick = len(known) != 1 and max(known, default=1) <= _SIMILAR_FACTOR * min(known, default=1)
    is_as_good = abs(losses[0] - losses[1]) <= _SIMILAR_LOSS
    figures = " and ".join(_count(count) for count in batches)
    return Case(
        is_as_quick and is_as_good,
        f"{worker_count(workers)}: {figures} batches, final loss {losses[0]:.3f} and {losses[1]:.3f}",
    )


def _rises(values: Iterable[float]) -> str:
    return f"rise {', '.join(f'{value:.2f}' for value in values)}"


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.4g}"
