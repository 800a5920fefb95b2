"""Very stale gradients at a high learning rate: plain asynchronous training is lost, and dividing the rate saves it.

What arXiv 1511.05950 saw with 30 learners is seen with three workers if each pushes many gradients of one model.
"""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.staleness_figures import Outcome, is_rescued
from benchmarks.staleness_pauses import NoPauses
from benchmarks.staleness_rules import ASYNCHRONOUS, MODULATED, RuleChoice, synchronous
from benchmarks.staleness_training import Bench, Training
from coordinator.simulation.aligned_table import aligned


@dataclasses.dataclass(frozen=True)
class Modulation:
    """What is compared.

    Attributes:
      learning_rate: of plain SGD, the same for all.
      pushes: how many gradients an asynchronous step computes on one model, and a synchronous update waits for.
      gradients: how many each training takes in all.
      seeds: each rule trains once with each.
    """

    learning_rate: float = 0.2
    pushes: int = 16
    gradients: int = 1280
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def rules(self) -> tuple[tuple[RuleChoice, int], ...]:
        """The rules, and how many gradients their steps push."""
        return (synchronous(self.pushes), 1), (ASYNCHRONOUS, self.pushes), (MODULATED, self.pushes)

    @property
    def trainings(self) -> int:
        """How many there are."""
        return len(self.seeds) * len(self.rules)

    def measure(self, bench: Bench, note: Callable[[str], object]) -> dict[str, list[Outcome]]:
        """Trains, and returns how far each rule came with each seed; see `Comparison.measure`."""
        found: dict[str, list[Outcome]] = {choice.name: [] for choice, _ in self.rules}
        for seed in self.seeds:
            for choice, pushes in self.rules:
                found[choice.name].append(self._train(bench, choice, pushes, seed))
                note(f"{choice.name}, very stale")
        return found

    def table(self, found: dict[str, list[Outcome]]) -> str:
        """The figures, a row for each rule, and whether the effect showed."""
        verdict = "The effect showed" if is_rescued(*found.values()) else "The effect did NOT show"
        head = ("rule", "staleness mean", *(f"loss, seed {seed}" for seed in self.seeds), "accuracies")
        return (
            aligned(head, [_row(name, outcomes) for name, outcomes in found.items()])
            + f"\n{verdict}, with every seed: plain asynchronous training is lost, and the other two learn."
        )

    def describe(self) -> str:
        """What the table shows, in a few lines."""
        return (
            f"Each asynchronous step pulls once and pushes {self.pushes} gradients of that model; a synchronous update "
            f"is the mean of {self.pushes}.\nSGD at {self.learning_rate:g}, {self.gradients} gradients in each "
            "training; loss of the training images and held-out accuracies at its end."
        )

    def _train(self, bench: Bench, choice: RuleChoice, pushes: int, seed: int) -> Outcome:
        training = Training(bench, choice, NoPauses(), learning_rate=self.learning_rate, seed=seed, pushes=pushes)
        training.train(lambda: training.steps * pushes < self.gradients)
        return Outcome(training.loss(), training.accuracy(), training.statistics().staleness.mean)


def _row(name: str, outcomes: Sequence[Outcome]) -> Sequence[str]:
    return (
        name,
        " ".join(f"{outcome.mean_staleness:.1f}" for outcome in outcomes),
        *("not finite" if outcome.loss is None else f"{outcome.loss:.3f}" for outcome in outcomes),
        " ".join(f"{outcome.accuracy:.3f}" for outcome in outcomes),
    )
