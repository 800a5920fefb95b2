"""The paper's findings, held against what was measured; each is a plain function of the curves.

"Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect" finds that more delay makes training less
stable and slower, that more workers do the same, and that without delay synchronous and asynchronous training are about
the same.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.testbed.cell import ASYNCHRONOUS, SYNCHRONOUS, Cell, worker_count
from coordinator.testbed.loss_curve import Curve

# The share of the pairs of a series that must be in order for it to count as rising.
_IN_ORDER = 0.75
# What counts as about the same: batches by this factor at most, final losses by this much.
_ALIKE_FACTOR, _ALIKE_LOSS = 1.5, 0.1
# Figures by a delay, or by a number of workers; rising.
_Series = dict[float, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """One place where a finding was looked for.

    Attributes:
      agrees: whether it showed.
      figures: what was measured there, in words.
    """

    agrees: bool
    figures: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the paper says, and whether it is so here.

    Attributes:
      claim: what it says.
      cases: where it was looked for; none if no cells of the grid show it.
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


def findings(curves: Sequence[Curve], target: float) -> list[Finding]:
    """All of them.

    Args:
      curves: one for each cell that was trained.
      target: the loss that counts as learned.
    """

    def slowness(curve: Curve) -> float:
        return curve.batches_to(target) or math.inf

    return [
        Finding("more delay, more instability", _along_delays(curves, "spikes", lambda curve: curve.spikes)),
        Finding("more delay, slower convergence", _along_delays(curves, "batches", slowness)),
        Finding("more workers, more instability", _along_workers(curves, "spikes", lambda curve: curve.spikes)),
        Finding("more workers, slower convergence", _along_workers(curves, "batches", slowness)),
        Finding("no delay, synchronous and asynchronous about the same", _alike(curves, target)),
    ]


def is_rising(values: Sequence[float]) -> bool:
    """Whether numbers rise on the whole: the last is above the first, and three of four pairs are in order.

    Of a pair that is equal, half counts.
    """
    pairs = [(before, after) for place, after in enumerate(values) for before in values[:place]]
    in_order = sum(1.0 if before < after else 0.5 * (before == after) for before, after in pairs)
    return bool(pairs) and values[-1] > values[0] and in_order >= _IN_ORDER * len(pairs)


def _along_delays(curves: Sequence[Curve], what: str, value: Callable[[Curve], float]) -> tuple[Case, ...]:
    found = {curve.cell: value(curve) for curve in curves if curve.cell.mode == ASYNCHRONOUS}
    return _rising(
        _series(found, lambda cell: cell.workers, lambda cell: cell.delay),
        lambda workers, of: f"{worker_count(workers)}: {_figures(of, what, ' s')}",
    )


def _along_workers(curves: Sequence[Curve], what: str, value: Callable[[Curve], float]) -> tuple[Case, ...]:
    found = {curve.cell: value(curve) for curve in curves if curve.cell.mode == ASYNCHRONOUS and curve.cell.delay > 0}
    return _rising(
        _series(found, lambda cell: cell.delay, lambda cell: cell.workers),
        lambda delay, of: f"delay {delay:g} s: {_figures(of, what, '')}",
    )


def _series(found: Mapping[Cell, float], of: Callable[[Cell], Any], along: Callable[[Cell], Any]) -> dict[Any, _Series]:
    """What was found along one side of the grid, for each place on the other; both rising."""
    series: dict[Any, _Series] = {}
    for cell in sorted(found, key=lambda cell: (of(cell), along(cell))):
        series.setdefault(of(cell), {})[along(cell)] = found[cell]
    return series


def _rising(series: Mapping[Any, _Series], said: Callable[[Any, _Series], str]) -> tuple[Case, ...]:
    """Whether each rises, if there is more than one place on it, and what to say of it."""
    return tuple(
        Case(is_rising(list(each.values())), said(place, each)) for place, each in series.items() if len(each) > 1
    )


def _alike(curves: Sequence[Curve], target: float) -> tuple[Case, ...]:
    by_cell = {curve.cell: curve for curve in curves}
    pairs = [
        (cell.workers, by_cell[cell], by_cell[other])
        for cell in sorted(by_cell, key=lambda cell: cell.workers)
        if cell.mode == SYNCHRONOUS and (other := Cell(ASYNCHRONOUS, cell.workers, 0.0)) in by_cell
    ]
    return tuple(_alike_case(*pair, target) for pair in pairs)


def _alike_case(workers: int, synchronous: Curve, asynchronous: Curve, target: float) -> Case:
    batches = [curve.batches_to(target) for curve in (synchronous, asynchronous)]
    losses = [curve.final_loss for curve in (synchronous, asynchronous)]
    known = [count for count in batches if count is not None]
    is_as_quick = len(known) != 1 and max(known, default=1) <= _ALIKE_FACTOR * min(known, default=1)
    is_as_good = abs(losses[0] - losses[1]) <= _ALIKE_LOSS
    figures = " and ".join(_count(count) for count in batches)
    return Case(
        is_as_quick and is_as_good,
        f"{worker_count(workers)}: {figures} batches, final loss {losses[0]:.3f} and {losses[1]:.3f}",
    )


def _figures(series: _Series, what: str, unit: str) -> str:
    keys = ", ".join(f"{key:g}" for key in series)
    values = ", ".join(_count(value) for value in series.values())
    return f"{values} {what} with {keys}{unit or ' workers'}"


def _count(value: float | None) -> str:
    return "never" if value is None or math.isinf(value) else f"{value:.0f}"
