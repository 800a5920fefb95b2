"""The rules side by side: digits are learned by three workers, one of which is slow."""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.staleness_figures import RuleFigures, middle
from benchmarks.staleness_pauses import OneSlowWorker
from benchmarks.staleness_rules import RULES, WORKERS, RuleChoice
from benchmarks.staleness_training import Training, TrainingCluster
from coordinator.simulation.result import aligned

LEARNING_RATE = 0.2
LAST_WORKER_SLOW = OneSlowWorker(unit=0.025, slow_worker=WORKERS - 1, factor=4.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of all rules.

    Attributes:
      rules: the rules.
      repeats: the number of trainings of each rule; the rules take turns.
      steps: the number of steps after which the accuracy is measured.
      seconds: the training time after which the accuracy is measured.
      pauses: the pauses of the steps, which make one worker slow.
    """

    rules: tuple[RuleChoice, ...] = RULES
    repeats: int = 3
    steps: int = 100
    seconds: float = 4.0
    pauses: OneSlowWorker = LAST_WORKER_SLOW

    @property
    def trainings(self) -> int:
        """The number of trainings."""
        return self.repeats * len(self.rules)

    def measure(self, shared: TrainingCluster, note: Callable[[str], object]) -> dict[str, list[RuleFigures]]:
        """Trains, and returns the figures of each rule in each repeat.

        Args:
          shared: the cluster.
          note: called with the name of each finished training.
        """
        found: dict[str, list[RuleFigures]] = {choice.name: [] for choice in self.rules}
        for repeat in range(self.repeats):
            for choice in self.rules:
                found[choice.name].append(self._train(shared, choice, seed=repeat))
                note(choice.name)
        return found

    def table(self, found: dict[str, list[RuleFigures]]) -> str:
        """Returns the table of the figures, a row for each rule."""
        head = (
            "rule",
            "steps/s",
            f"accuracy: {self.steps} steps",
            f"{self.seconds:g} s",
            "staleness",
            "max",
            "updates",
            "rejected",
            "idle by worker",
        )
        return aligned(head, [_row(choice.name, middle(found[choice.name])) for choice in self.rules])

    def describe(self) -> str:
        """Describes the table in a few lines."""
        pauses = self.pauses
        return (
            f"Digits, {WORKERS} workers; a step takes {pauses.unit * 1e3:g} ms, on worker {pauses.slow_worker} "
            f"{pauses.factor:g} times that; SGD at {LEARNING_RATE:g} under every rule; medians of {self.repeats}.\n"
            "A step is a minibatch whose gradient was taken. The columns from staleness on are of whole trainings."
        )

    def _train(self, shared: TrainingCluster, choice: RuleChoice, seed: int) -> RuleFigures:
        training = Training(shared, choice, self.pauses, learning_rate=LEARNING_RATE, seed=seed)
        accuracies: dict[str, float] = {}
        goals = {"steps": lambda: training.steps < self.steps, "time": lambda: training.seconds < self.seconds}
        while goals:
            training.train(lambda: all(is_open() for is_open in goals.values()))
            for reached in [name for name, is_open in goals.items() if not is_open()]:
                accuracies[reached] = training.accuracy()
                del goals[reached]
        return RuleFigures.of(
            training.statistics(), steps_per_second=training.steps / training.seconds, accuracies=accuracies
        )


def _row(name: str, figures: RuleFigures) -> Sequence[str]:
    return (
        name,
        f"{figures.steps_per_second:.1f}",
        f"{figures.accuracy_at_steps:.3f}",
        f"{figures.accuracy_at_time:.3f}",
        f"{figures.mean_staleness:.2f}",
        str(figures.max_staleness),
        f"{figures.updates:.0f}",
        f"{figures.rejected:.0%}",
        " ".join(f"{share:4.0%}" for share in figures.idle_shares),
    )
