"""A real run and its simulation side by side, how far they are apart, and why."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from coordinator.simulation.aligned_table import aligned
from coordinator.testbed.confirmation.figures import Figures
from coordinator.testbed.confirmation.step_times import StepTimes
from coordinator.updates.state.gate import PAUSE

# How far apart two figures may be that agree, as a share of the real one.
TOLERANCE = 0.1
# From this share on, waiting is a part of what happens.
_MUCH_IDLE = 0.02

_HEAD = (
    "rule, workers",
    "staleness",
    "simulated",
    "off by",
    "p99",
    "simulated",
    "updates/s",
    "simulated",
    "off by",
    "idle",
    "simulated",
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One setting, real and simulated.

    Attributes:
      rule: its name.
      workers: how many, the last of which is slow.
      real, simulated: what came of both.
      repeated: the figures of each real run by itself.
      times: what the steps of the real runs took, which is what the simulator was given.
    """

    rule: str
    workers: int
    real: Figures
    simulated: Figures
    repeated: Sequence[Figures]
    times: StepTimes

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.rule}, {self.workers}"

    @property
    def staleness_off_by(self) -> float:
        """How much larger the simulated mean staleness is, as a share of the real one."""
        return _off_by(self.real.mean_staleness, self.simulated.mean_staleness)

    @property
    def speed_off_by(self) -> float:
        """The same of the updates in a second."""
        return _off_by(self.real.updates_per_second, self.simulated.updates_per_second)

    @property
    def agrees(self) -> bool:
        """Whether both are within the tolerance."""
        return max(abs(self.staleness_off_by), abs(self.speed_off_by)) <= TOLERANCE

    def explanation(self) -> str:
        """By how much they do not agree, and why as far as the runs tell."""
        parts = []
        for what, name, share in (
            ("mean staleness", "mean_staleness", self.staleness_off_by),
            ("updates/s", "updates_per_second", self.speed_off_by),
        ):
            if abs(share) <= TOLERANCE:
                continue
            values = [getattr(each, name) for each in self.repeated]
            is_noise = min(values) <= getattr(self.simulated, name) <= max(values)
            why = "the simulated one is among them: noise" if is_noise else "so it is more than noise"
            parts.append(f"{what} {100 * share:+.0f}%; the real runs had {min(values):.2f} to {max(values):.2f}, {why}")
        if self.real.idle_share > _MUCH_IDLE:
            asked = 1e3 * (PAUSE + self.times.pull)
            parts.append(f"a real worker that waits asks again only every {asked:.1f} ms, or more if others wait, too")
        return f"{self.name}: {'; '.join(parts)}."


def table(comparisons: Sequence[Comparison]) -> str:
    """A row for each."""
    return aligned(_HEAD, [_row(comparison) for comparison in comparisons])


def times_table(comparisons: Sequence[Comparison]) -> str:
    """What the simulator was given for each, in milliseconds: means."""
    head = ("rule, workers", "computes", "the slow one", "pull", "push", "dispatch", "of a step, overheads are")
    rows = []
    for comparison in comparisons:
        times = comparison.times
        usual, slow = np.mean(np.concatenate(times.computed[:-1])), np.mean(times.computed[-1])
        overheads = times.pull + times.push + float(np.mean(times.dispatch))
        shown = [_ms(float(each)) for each in (usual, slow, times.pull, times.push, np.mean(times.dispatch))]
        rows.append((comparison.name, *shown, f"{overheads / (overheads + usual):.0%}"))
    return aligned(head, rows)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """How many agree, and why the others do not, in lines."""
    agreeing = sum(comparison.agrees for comparison in comparisons)
    lines = [
        f"{agreeing} of {len(comparisons)} settings agree within {TOLERANCE:.0%} in mean staleness and in updates/s."
    ]
    lines += [comparison.explanation() for comparison in comparisons if not comparison.agrees]
    return "\n".join(lines)


def _row(comparison: Comparison) -> tuple[str, ...]:
    real, simulated = comparison.real, comparison.simulated
    return (
        comparison.name,
        f"{real.mean_staleness:.2f}",
        f"{simulated.mean_staleness:.2f}",
        f"{100 * comparison.staleness_off_by:+.1f}%",
        f"{real.p99_staleness:g}",
        f"{simulated.p99_staleness:g}",
        f"{real.updates_per_second:.2f}",
        f"{simulated.updates_per_second:.2f}",
        f"{100 * comparison.speed_off_by:+.1f}%",
        f"{real.idle_share:.1%}",
        f"{simulated.idle_share:.1%}",
    )


def _off_by(real: float, simulated: float) -> float:
    if real == simulated:
        return 0.0
    return (simulated - real) / real if real else math.inf


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
