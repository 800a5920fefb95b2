"""The idle time of workers under bounded delay, with random stragglers: the curve of ps-lite (OSDI'14)."""

import dataclasses
import statistics
from collections.abc import Callable

from benchmarks.staleness_figures import is_falling_to_little
from benchmarks.staleness_pauses import HeavyTail
from benchmarks.staleness_rules import WORKERS, bounded_delay
from benchmarks.staleness_training import Training, TrainingCluster
from coordinator.simulation.result import aligned

LEARNING_RATE = 0.1
STRAGGLERS = HeavyTail(unit=0.01)
_BAR_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Idleness:
    """The figures of one training.

    Attributes:
      idle_share: the mean share of the workers' time that they waited, from 0 to 1.
      max_staleness: the largest staleness of a gradient.
      steps_per_second: steps that finished.
    """

    idle_share: float
    max_staleness: int
    steps_per_second: float


@dataclasses.dataclass(frozen=True)
class IdleCurve:
    """The measurement. An update averages as many gradients as there are workers, as in ps-lite.

    Attributes:
      delays: values of the rule's `max_delay`, increasing.
      repeats: the number of trainings with each; they take turns.
      steps: the number of steps of each training.
      pauses: the pauses of the steps.
    """

    delays: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    repeats: int = 2
    steps: int = 200
    pauses: HeavyTail = STRAGGLERS

    @property
    def trainings(self) -> int:
        """The number of trainings."""
        return self.repeats * len(self.delays)

    def measure(self, shared: TrainingCluster, note: Callable[[str], object]) -> dict[int, list[Idleness]]:
        """Trains, and returns the figures of each delay in each repeat; see `Comparison.measure`."""
        found: dict[int, list[Idleness]] = {delay: [] for delay in self.delays}
        for repeat in range(self.repeats):
            for delay in self.delays:
                found[delay].append(self._train(shared, delay, seed=repeat))
                note(f"idle at delay {delay}")
        return found

    def shares(self, found: dict[int, list[Idleness]]) -> list[float]:
        """Returns the median idle share at each delay."""
        return [statistics.median(each.idle_share for each in found[delay]) for delay in self.delays]

    def table(self, found: dict[int, list[Idleness]]) -> str:
        """Returns the table of the figures, a row for each delay, and the verdict about its shape."""
        rows = [
            (
                f"{delay:<3} {'#' * round(share * _BAR_WIDTH):{_BAR_WIDTH // 2 + 4}}",
                f"{share:.1%}",
                str(max(each.max_staleness for each in found[delay])),
                f"{statistics.median(each.steps_per_second for each in found[delay]):.1f}",
            )
            for delay, share in zip(self.delays, self.shares(found), strict=True)
        ]
        shares = self.shares(found)
        verdict = "The shape was reproduced" if is_falling_to_little(shares) else "The shape was NOT reproduced"
        return (
            aligned(("max_delay", "idle", "max staleness", "steps/s"), rows)
            + f"\n{verdict}, a fall from about half to a few percent: it is from {shares[0]:.0%} to {shares[-1]:.0%}."
        )

    def describe(self) -> str:
        """Describes the table in a few lines."""
        pauses = self.pauses
        slow = ", ".join(
            f"{share:.0%} {factor:g} times that or more"
            for factor, share in zip(pauses.factors, pauses.shares, strict=True)
        )
        return (
            f"Bounded delay with {WORKERS} gradients an update; any step may straggle: most take "
            f"{pauses.unit * 1e3:g} ms, {slow}; medians of {self.repeats}."
        )

    def _train(self, shared: TrainingCluster, delay: int, seed: int) -> Idleness:
        choice = bounded_delay(delay, grads_to_wait=WORKERS)
        training = Training(shared, choice, self.pauses, learning_rate=LEARNING_RATE, seed=seed)
        training.train(lambda: training.steps < self.steps)
        seen = training.statistics()
        return Idleness(
            statistics.mean(seen.idle_shares.values()), seen.staleness.max, training.steps / training.seconds
        )
