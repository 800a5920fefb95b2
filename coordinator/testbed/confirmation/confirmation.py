"""Real runs of all rules with several numbers of workers, and simulations with the same numbers.

The simulator is given the measured times of the parts of the real steps. It has to predict what follows from them: how
long workers wait, how stale gradients are, and how many are accepted.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.errors import SettingError
from coordinator.options import Options
from coordinator.setting_checks import check_integer, check_number
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay, ModelAverage, StaleSynchronous, Synchronous
from coordinator.testbed.experiment import MOST_WORKERS, Experiment
from coordinator.testbed.measurement import new_progress_bar, new_strategy
from coordinator.testbed.step_times import Run, Sleeps

if TYPE_CHECKING:
    from coordinator.testbed.confirmation.comparison import Comparison

# By their names in tables; of each the rule for a number of workers.
RULES: Mapping[str, Callable[[int], Rule]] = {
    "async": lambda _: Asynchronous(),
    "sync": Synchronous,
    "SSP": lambda _: StaleSynchronous(get_model_frequency=2, max_lead=2),
    "bounded delay": lambda _: BoundedDelay(max_delay=3),
    "model average": lambda _: ModelAverage(),
}
_SLEEPS = Sleeps()


def confirm(given: Mapping[str, Any]) -> None:
    """Runs the command.

    Args:
      given: its options by name; None for options that were not given.

    Raises:
      SettingError: an option is wrong.
      LaunchError: tqdm is not installed, or a server did not start.
      Exception: what `ParameterServerStrategy.join` raises.
    """
    confirmation = Confirmation.of(given)
    print(confirmation, flush=True)
    load = os.getloadavg()[0]
    with new_progress_bar(confirmation.runs, "run") as progress:
        comparisons = confirmation.compare(progress.update)
    from coordinator.testbed.confirmation.comparison import table, times_table, verdict

    print(f"{os.cpu_count()} cpus, load {load:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end")
    print(f"\nMean times of real steps, which the simulator was given:\n\n{times_table(comparisons)}")
    print(f"\nReal, and simulated:\n\n{table(comparisons)}\n\n{verdict(comparisons)}", flush=True)


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """The settings to compare.

    Attributes:
      workers: the numbers of workers, at least two each.
      seconds: the duration of each real run.
      repeats: the number of real runs of each setting, whose total is compared.

    Raises:
      SettingError: one of them is not allowed.
    """

    workers: Sequence[int] = (2, 3, 4)
    seconds: float = 10.0
    repeats: int = 3

    def __post_init__(self) -> None:
        if not self.workers or not all(2 <= workers <= MOST_WORKERS for workers in self.workers):
            raise SettingError("workers", f"must be from 2 to {MOST_WORKERS}, one of them slow; got {self.workers!r}.")
        check_number("confirm_seconds", self.seconds, 1, 3600, unit="seconds")
        check_integer("confirm_repeats", self.repeats, 1, 100)

    @property
    def runs(self) -> int:
        """The number of real runs."""
        return self.repeats * len(RULES) * len(self.workers)

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Confirmation":
        """Parses the options of the command.

        Args:
          given: `workers` as text; `confirm_seconds` and `confirm_repeats`; None for options that were not given.

        Raises:
          SettingError: an option is wrong, or is for experiments only.
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
                raise SettingError("workers", f"must be integers such as 2,3,4; got {text!r}.") from None
        return Confirmation(**chosen)

    def compare(self, on_run: Callable[[], object]) -> list["Comparison"]:
        """Makes all real runs and simulations, and returns their comparisons.

        Args:
          on_run: called after each real run.

        Raises:
          LaunchError: a server did not start.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        settings = [(name, rule(workers), workers) for name, rule in RULES.items() for workers in self.workers]
        runs: list[list[Run]] = [[] for _ in settings]
        # One step per call: with several, only the first would be dispatched.
        with new_strategy(max(self.workers), Options(steps_per_dispatch=1)) as strategy:
            from coordinator.testbed.confirmation.comparison import Comparison
            from coordinator.testbed.confirmation.real_steps import RealSteps

            steps = [RealSteps(strategy, rule, workers, _SLEEPS) for _, rule, workers in settings]
            # They take turns, so that other load of the machine affects all of them.
            for _ in range(self.repeats):
                for each, of_each in zip(steps, runs, strict=True):
                    of_each.append(each.run(self.seconds))
                    on_run()
        return [Comparison.of_runs(name, rule, each) for (name, rule, _), each in zip(settings, runs, strict=True)]

    def __str__(self) -> str:
        return (
            f"{', '.join(RULES)}; {', '.join(map(str, self.workers))} workers, the last one slow; "
            f"steps sleep {_SLEEPS}; {self.repeats} runs of {self.seconds:g} s"
        )
