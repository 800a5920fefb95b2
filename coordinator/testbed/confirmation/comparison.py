"""A real run and its simulation side by side, their differences, and the reasons."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.simulation import rules as simulated
from coordinator.simulation.result import Result
from coordinator.simulation.rule import Rule
from coordinator.simulation.text_report import aligned
from coordinator.testbed.confirmation.step_times import Run, StepTimes
from coordinator.updates.rule_statistics import Staleness
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.rules.bounded_delay import BoundedDelay
from coordinator.updates.rules.stale_synchronous import StaleSynchronous
from coordinator.updates.rules.synchronous import Synchronous
from coordinator.updates.state.gate import PAUSE
from coordinator.updates.update_rule import UpdateRule


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


FREQUENCY, MAX_LEAD, MAX_DELAY = 2, 2, 3


@dataclasses.dataclass(frozen=True)
class ConfirmedRule:
    """A rule, on a cluster and simulated.

    Attributes:
      name: its name in tables.
      real: creates it for variables and a number of workers, in the strategy's scope.
      simulated: creates its simulation for a number of workers.
    """

    name: str
    real: Callable[[Sequence[Any], int], UpdateRule]
    simulated: Callable[[int], Rule]


def _descend(variable: Any, gradient: Any, rate: Any) -> None:
    variable.assign_sub(rate * gradient)


def _real(kind: Callable[..., UpdateRule], variables: Sequence[Any], **settings: int) -> UpdateRule:
    return kind(_descend, variables, learning_rate=1e-6, **settings)


RULES = (
    ConfirmedRule("async", lambda variables, _: _real(Asynchronous, variables), lambda _: simulated.Asynchronous()),
    ConfirmedRule(
        "sync",
        lambda variables, workers: _real(Synchronous, variables, grads_to_wait=workers),
        simulated.Synchronous,
    ),
    ConfirmedRule(
        "SSP",
        lambda variables, _: _real(StaleSynchronous, variables, get_model_frequency=FREQUENCY, max_lead=MAX_LEAD),
        lambda _: simulated.StaleSynchronous(FREQUENCY, MAX_LEAD),
    ),
    ConfirmedRule(
        "bounded delay",
        lambda variables, _: _real(BoundedDelay, variables, max_delay=MAX_DELAY),
        lambda _: simulated.BoundedDelay(MAX_DELAY),
    ),
)


# The largest relative difference of figures that agree.
TOLERANCE = 0.1
# From this share on, waiting is named as a reason.
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
      workers: the number of workers, of which the last is slow.
      real: the figures of the real runs together.
      simulated: those of the simulation.
      repeated: the figures of each real run.
      times: the times of the real steps, which the simulator was given.
    """

    rule: str
    workers: int
    real: Figures
    simulated: Figures | Result
    repeated: Sequence[Figures]
    times: StepTimes

    @property
    def name(self) -> str:
        """Rule and number of workers."""
        return f"{self.rule}, {self.workers}"

    @property
    def staleness_off_by(self) -> float:
        """The relative difference of the simulated mean staleness to the real one."""
        return _off_by(self.real.mean_staleness, self.simulated.mean_staleness)

    @property
    def speed_off_by(self) -> float:
        """The relative difference of the simulated updates per second to the real ones."""
        return _off_by(self.real.updates_per_second, self.simulated.updates_per_second)

    @property
    def agrees(self) -> bool:
        """True if both differences are within the tolerance."""
        return max(abs(self.staleness_off_by), abs(self.speed_off_by)) <= TOLERANCE

    def explanation(self) -> str:
        """Returns the differences beyond the tolerance, with reasons as far as the runs show them."""
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
    """Returns a table with a row for each comparison."""
    return aligned(_HEAD, [_row(comparison) for comparison in comparisons])


def times_table(comparisons: Sequence[Comparison]) -> str:
    """Returns a table of the mean times that the simulator was given, in milliseconds."""
    head = ("rule, workers", "computes", "the slow one", "pull", "push", "dispatch", "of a step, overheads are")
    rows = []
    for comparison in comparisons:
        times = comparison.times
        usual, slow = np.mean(np.concatenate(times.computed[:-1])), np.mean(times.computed[-1])
        overheads = times.pull + times.push + float(np.mean(times.dispatch))
        seconds = (usual, slow, times.pull, times.push, np.mean(times.dispatch))
        shown = [f"{1e3 * each:.1f} ms" for each in seconds]
        rows.append((comparison.name, *shown, f"{overheads / (overheads + usual):.0%}"))
    return aligned(head, rows)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Returns how many comparisons agree, and why the others do not, a line each."""
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
