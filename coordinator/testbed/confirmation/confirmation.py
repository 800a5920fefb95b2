"""Real runs of all rules at several numbers of workers, and simulations with the same numbers.

The simulator is given what the parts of the real steps took, one by one. What it has to get right by itself is what
comes of them when workers meet: who waits how long, whose gradient is how stale, how many are taken.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.errors import SettingError
from coordinator.options import Options
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.confirmation.comparison import Comparison
from coordinator.testbed.confirmation.confirmed_rule import RULES, ConfirmedRule
from coordinator.testbed.confirmation.figures import Figures
from coordinator.testbed.confirmation.real_steps import RealSteps, Run
from coordinator.testbed.confirmation.sleeps import Sleeps
from coordinator.testbed.confirmation.step_times import StepTimes
from coordinator.testbed.experiment import MOST_WORKERS, Experiment
from coordinator.testing.local_cluster import LocalCluster


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """What is compared.

    Attributes:
      workers: how many, at least two each.
      seconds: how long each real run is watched.
      repeats: how often each is made; what they come to together is compared.
      sleeps: what steps sleep for.
      rules: which rules.

    Raises:
      SettingError: one of them cannot be.
    """

    workers: Sequence[int] = (2, 3, 4)
    seconds: float = 10.0
    repeats: int = 3
    sleeps: Sleeps = dataclasses.field(default_factory=Sleeps)
    rules: Sequence[ConfirmedRule] = RULES

    def __post_init__(self) -> None:
        if not self.workers or not all(2 <= workers <= MOST_WORKERS for workers in self.workers):
            raise SettingError("workers", f"must be from 2 to {MOST_WORKERS}, one of them slow; got {self.workers!r}.")
        if not 1 <= self.seconds <= 3600:
            raise SettingError("confirm_seconds", f"must be from 1 to 3600, got {self.seconds!r}.")
        if not 1 <= self.repeats <= 100:
            raise SettingError("confirm_repeats", f"must be a whole number from 1 to 100, got {self.repeats!r}.")

    @property
    def runs(self) -> int:
        """How many real runs there are."""
        return self.repeats * len(self.rules) * len(self.workers)

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Confirmation":
        """The confirmation that options ask for.

        Args:
          given: `workers` as text; `confirm_seconds` and `confirm_repeats`; None for what was not given.

        Raises:
          SettingError: what was given cannot be, or is for an experiment.
        """
        for field in dataclasses.fields(Experiment):
            if field.name != "workers" and given.get(field.name) is not None:
                raise SettingError(field.name, "is for experiments; --confirm does not take it.")
        chosen = {name: given[f"confirm_{name}"] for name in ("seconds", "repeats")}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if (text := given.get("workers")) is not None:
            try:
                chosen["workers"] = tuple(sorted({int(part) for part in text.split(",")}))
            except ValueError:
                raise SettingError("workers", f"must be whole numbers such as 2,3,4; got {text!r}.") from None
        return Confirmation(**chosen)

    def compare(self, note: Callable[[], object] = lambda: None) -> list[Comparison]:
        """Runs everything, and returns what came of it.

        Args:
          note: called after each real run.

        Raises:
          LaunchError: a server did not start.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        with (
            LocalCluster(max(self.workers), 1) as cluster,
            # One step a call: of several in one, all but the first would not be dispatched.
            ParameterServerStrategy(cluster.resolver, options=Options(steps_per_dispatch=1)) as strategy,
        ):
            settings = [(rule, workers) for rule in self.rules for workers in self.workers]
            steps = [RealSteps(strategy, rule, workers, self.sleeps) for rule, workers in settings]
            runs: list[list[Run]] = [[] for _ in settings]
            # They take turns, so that all have their share of what else the machine does.
            for _ in range(self.repeats):
                for each, of_each in zip(steps, runs, strict=True):
                    of_each.append(each.run(self.seconds))
                    note()
        return [_comparison(rule, workers, each) for (rule, workers), each in zip(settings, runs, strict=True)]

    def __str__(self) -> str:
        return (
            f"{', '.join(rule.name for rule in self.rules)}; {', '.join(map(str, self.workers))} workers, the last one "
            f"slow; steps sleep {self.sleeps}; {self.repeats} runs of {self.seconds:g} s"
        )


def _comparison(rule: ConfirmedRule, workers: int, runs: Sequence[Run]) -> Comparison:
    counted = [run.counted for run in runs]
    times = StepTimes.of([run.noted for run in runs], sum(each.waited for each in counted))
    return Comparison(
        rule.name,
        workers,
        Figures.of_runs(counted, workers),
        Figures.of_simulation(simulate(times.setting(rule.simulated(workers)))),
        [Figures.of_runs([each], workers) for each in counted],
        times,
    )
