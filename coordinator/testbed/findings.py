"""The paper's findings, held against what was measured; each is a plain function of the curves.

"Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect" finds that more delay makes training less
stable and slower, that more workers do the same, and that without delay synchronous and asynchronous training are about
the same.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from coordinator.testbed.cell import ASYNCHRONOUS, SYNCHRONOUS, Cell
from coordinator.testbed.curve import Curve

# The share of the pairs of a series that must be in order for it to count as rising.
_IN_ORDER = 0.75
# What counts as about the same: batches by this factor at most, final losses by this much.
_ALIKE_FACTOR, _ALIKE_LOSS = 1.5, 0.1


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
    series = {
        workers: {cell.delay: found[cell] for cell in _sorted(found) if cell.workers == workers}
        for workers in sorted({cell.workers for cell in found})
    }
    return tuple(
        Case(is_rising(list(of.values())), f"{_workers(workers)}: {_figures(of, what, ' s')}")
        for workers, of in series.items()
        if len(of) > 1
    )


def _along_workers(curves: Sequence[Curve], what: str, value: Callable[[Curve], float]) -> tuple[Case, ...]:
    found = {curve.cell: value(curve) for curve in curves if curve.cell.mode == ASYNCHRONOUS and curve.cell.delay > 0}
    series = {
        delay: {cell.workers: found[cell] for cell in _sorted(found) if cell.delay == delay}
        for delay in sorted({cell.delay for cell in found})
    }
    return tuple(
        Case(is_rising(list(of.values())), f"delay {delay:g} s: {_figures(of, what, '')}")
        for delay, of in series.items()
        if len(of) > 1
    )


def _alike(curves: Sequence[Curve], target: float) -> tuple[Case, ...]:
    by_cell = {curve.cell: curve for curve in curves}
    pairs = [
        (cell.workers, by_cell[cell], by_cell[other])
        for cell in _sorted(by_cell)
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
        f"{_workers(workers)}: {figures} batches, final loss {losses[0]:.3f} and {losses[1]:.3f}",
    )


def _sorted(cells: "dict[Cell, float] | dict[Cell, Curve]") -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.workers, cell.delay))


def _figures(series: "dict[float, float] | dict[int, float]", what: str, unit: str) -> str:
    keys = ", ".join(f"{key:g}" for key in series)
    values = ", ".join(_count(value) for value in series.values())
    return f"{values} {what} with {keys}{unit or ' workers'}"


def _count(value: float | None) -> str:
    return "never" if value is None or math.isinf(value) else f"{value:.0f}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
