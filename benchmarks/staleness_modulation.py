"""Very stale gradients at a high learning rate: plain asynchronous training is lost, and dividing the rate saves it.

What arXiv 1511.05950 saw with 30 learners is seen with three workers if each pushes many gradients of one model.
"""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.staleness_figures import Outcome, is_rescued
from benchmarks.staleness_pauses import NoPauses
from benchmarks.staleness_rules import ASYNCHRONOUS, MODULATED, RuleChoice, synchronous
from benchmarks.staleness_training import Training, TrainingCluster
from coordinator.simulation.result import aligned


@dataclasses.dataclass(frozen=True)
class Modulation:
    """The comparison of learning rates for stale gradients.

    Attributes:
      learning_rate: of plain SGD, the same for all.
      pushes: the gradients that an asynchronous step computes on one model, or a synchronous update averages.
      gradients: the number of gradients of each training.
      seeds: the seeds; each rule trains once with each.
    """

    learning_rate: float = 0.2
    pushes: int = 16
    gradients: int = 1280
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def rules(self) -> tuple[tuple[RuleChoice, int], ...]:
        """The rules, each with the number of gradients that a step pushes."""
        return (synchronous(self.pushes), 1), (ASYNCHRONOUS, self.pushes), (MODULATED, self.pushes)

    @property
    def trainings(self) -> int:
        """The number of trainings."""
        return len(self.seeds) * len(self.rules)

    def measure(self, shared: TrainingCluster, note: Callable[[str], object]) -> dict[str, list[Outcome]]:
        """Trains, and returns the outcomes of each rule with each seed; see `Comparison.measure`."""
        found: dict[str, list[Outcome]] = {choice.name: [] for choice, _ in self.rules}
        for seed in self.seeds:
            for choice, pushes in self.rules:
                found[choice.name].append(self._train(shared, choice, pushes, seed))
                note(f"{choice.name}, very stale")
        return found

    def table(self, found: dict[str, list[Outcome]]) -> str:
        """Returns the table of the outcomes, a row for each rule, and the verdict."""
        verdict = "The effect showed" if is_rescued(*found.values()) else "The effect did NOT show"
        head = ("rule", "staleness mean", *(f"loss, seed {seed}" for seed in self.seeds), "accuracies")
        return (
            aligned(head, [_row(name, outcomes) for name, outcomes in found.items()])
            + f"\n{verdict}, with every seed: plain asynchronous training is lost, and the other two learn."
        )

    def describe(self) -> str:
        """Describes the table in a few lines."""
        return (
            f"Each asynchronous step pulls once and pushes {self.pushes} gradients of that model; a synchronous update "
            f"is the mean of {self.pushes}.\nSGD at {self.learning_rate:g}, {self.gradients} gradients in each "
            "training; loss of the training images and held-out accuracies at its end."
        )

    def _train(self, shared: TrainingCluster, choice: RuleChoice, pushes: int, seed: int) -> Outcome:
        training = Training(shared, choice, NoPauses(), learning_rate=self.learning_rate, seed=seed, pushes=pushes)
        training.train(lambda: training.steps * pushes < self.gradients)
        return Outcome(training.loss(), training.accuracy(), training.statistics().staleness.mean)


def _row(name: str, outcomes: Sequence[Outcome]) -> Sequence[str]:
    return (
        name,
        " ".join(f"{outcome.mean_staleness:.1f}" for outcome in outcomes),
        *("not finite" if outcome.loss is None else f"{outcome.loss:.3f}" for outcome in outcomes),
        " ".join(f"{outcome.accuracy:.3f}" for outcome in outcomes),
    )
