"""A real run and its simulation side by side, their differences, and the reasons."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from coordinator.simulation.result import Result
from coordinator.simulation.rule import Rule
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.text_report import aligned
from coordinator.testbed.step_times import Run, StepTimes
from coordinator.updates.rule_statistics import Staleness


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of real runs, by the names that the result of a simulation has.

    Attributes:
      mean_staleness: of the pushed gradients, in updates.
      p99_staleness: its 99th percentile.
      updates_per_second: updates of the model per second.
      idle_share: the share of the workers' time that they waited for the rule, from 0 to 1.
    """

    mean_staleness: float
    p99_staleness: int
    updates_per_second: float
    idle_share: float

    @classmethod
    def of_runs(cls, runs: Sequence[Run], workers: int) -> "Figures":
        """Returns the figures of several real runs together."""
        seconds = sum(run.seconds for run in runs)
        staleness = Staleness(tuple(map(int, np.sum([run.histogram for run in runs], axis=0))))
        return cls(
            staleness.mean,
            staleness.p99,
            sum(run.updates for run in runs) / seconds,
            sum(run.waited for run in runs) / (workers * seconds),
        )


# The figures in which a simulation must agree, in words.
_JUDGED = {"mean_staleness": "mean staleness", "updates_per_second": "updates/s"}
# The largest relative difference of figures that agree.
TOLERANCE = 0.1
# From this share on, waiting is named as a reason.
_MUCH_IDLE = 0.02


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One setting, real and simulated.

    Attributes:
      name: the rule and the number of workers, of which the last is slow.
      real: the figures of the real runs together.
      simulated: those of the simulation.
      repeated: the figures of each real run.
      times: the times of the real steps, which the simulator was given.
    """

    name: str
    real: Figures
    simulated: Figures | Result
    repeated: Sequence[Figures]
    times: StepTimes

    @classmethod
    def of_runs(cls, name: str, rule: Rule, runs: Sequence[Run]) -> "Comparison":
        """Simulates a rule with the times of real runs, and compares them."""
        times = StepTimes.of(runs)
        workers = len(times.computed)
        repeated = [Figures.of_runs([run], workers) for run in runs]
        real = Figures.of_runs(runs, workers)
        return cls(f"{name}, {workers}", real, simulate(times.setting(rule)), repeated, times)

    def off_by(self, figure: str) -> float:
        """Returns the relative difference of the simulated figure of a name to the real one."""
        real, simulated = getattr(self.real, figure), getattr(self.simulated, figure)
        if real == simulated:
            return 0.0
        return (simulated - real) / real if real else math.inf

    @property
    def agrees(self) -> bool:
        """True if the differences are within the tolerance."""
        return all(abs(self.off_by(figure)) <= TOLERANCE for figure in _JUDGED)

    def explanation(self) -> str:
        """Returns the differences beyond the tolerance, with reasons as far as the runs show them."""
        parts = []
        for figure, words in _JUDGED.items():
            if abs(self.off_by(figure)) <= TOLERANCE:
                continue
            values = [getattr(each, figure) for each in self.repeated]
            is_noise = min(values) <= getattr(self.simulated, figure) <= max(values)
            why = "the simulated value is " + ("in that range: within noise" if is_noise else "outside that range")
            difference = f"{words} {self.off_by(figure):+.0%}"
            parts.append(f"{difference}; the real runs had {min(values):.2f} to {max(values):.2f}, {why}")
        if self.real.idle_share > _MUCH_IDLE:
            parts.append("a real worker that waits may begin while the gradient that it waited for is being applied")
        return f"{self.name}: {'; '.join(parts)}."


# The titles of figures, their names, and their formats.
_COLUMNS = (
    ("staleness", "mean_staleness", ".2f"),
    ("p99", "p99_staleness", "g"),
    ("updates/s", "updates_per_second", ".2f"),
    ("idle", "idle_share", ".1%"),
)


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns a table with a row for each comparison."""
    head = ["rule, workers"]
    rows = [[comparison.name] for comparison in comparisons]
    for title, figure, form in _COLUMNS:
        head += [title, "simulated"]
        for row, comparison in zip(rows, comparisons, strict=True):
            row += [f"{getattr(each, figure):{form}}" for each in (comparison.real, comparison.simulated)]
        if figure in _JUDGED:
            head.append("off by")
            for row, comparison in zip(rows, comparisons, strict=True):
                row.append(f"{comparison.off_by(figure):+.1%}")
    return aligned(head, rows)


def times_table(comparisons: Sequence[Comparison]) -> str:
    """Returns a table of the mean times that the simulator was given, in milliseconds."""
    head = ("rule, workers", "compute", "compute (slow worker)", "pull", "push", "dispatch", "overhead share")
    rows = []
    for comparison in comparisons:
        times = comparison.times
        usual, slow = np.mean(np.concatenate(times.computed[:-1])), np.mean(times.computed[-1])
        overheads = (times.pull, times.push, float(np.mean(times.dispatch)))
        shown = [f"{1e3 * each:.1f} ms" for each in (usual, slow, *overheads)]
        rows.append((comparison.name, *shown, f"{sum(overheads) / (sum(overheads) + usual):.0%}"))
    return aligned(head, rows)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Returns how many comparisons agree, and why the others do not, a line each."""
    agreeing = sum(comparison.agrees for comparison in comparisons)
    lines = [
        f"{agreeing} of {len(comparisons)} settings agree within {TOLERANCE:.0%} in mean staleness and in updates/s."
    ]
    lines += [comparison.explanation() for comparison in comparisons if not comparison.agrees]
    return "\n".join(lines)
