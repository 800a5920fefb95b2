"""Real runs of all rules with several numbers of workers, and simulations with the same numbers.

The simulator is given the measured times of the parts of the real steps. It has to predict what follows from them: how
long workers wait, how stale gradients are, and how many are accepted.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.errors import SettingError
from coordinator.options import Options
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.setting_checks import check_integer, check_number
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.confirmation.comparison import (
    RULES,
    Comparison,
    ConfirmedRule,
    Figures,
    table,
    times_table,
    verdict,
)
from coordinator.testbed.confirmation.real_steps import RealSteps
from coordinator.testbed.confirmation.step_times import Run, Sleeps, StepTimes
from coordinator.testbed.experiment import MOST_WORKERS, Experiment, missing
from coordinator.testing.local_cluster import LocalCluster


def confirm(given: Mapping[str, Any]) -> None:
    """Runs the command.

    Args:
      given: its options by name; None for options that were not given.

    Raises:
      SettingError: an option is wrong.
      LaunchError: tqdm is not installed, or a server did not start.
      Exception: what `ParameterServerStrategy.join` raises.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing("tqdm") from None
    # TensorFlow reads it when it is loaded, on the next line.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    # Each setting traces the functions of its rule: TensorFlow's warning about that does not apply.
    tf.get_logger().setLevel("ERROR")
    confirmation = Confirmation.of(given)
    print(confirmation, flush=True)
    load = os.getloadavg()[0]
    with tqdm(total=confirmation.runs, unit="run", disable=None) as progress:
        comparisons = confirmation.compare(progress.update)
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
      sleeps: how long steps sleep.
      rules: the rules.

    Raises:
      SettingError: one of them is not allowed.
    """

    workers: Sequence[int] = (2, 3, 4)
    seconds: float = 10.0
    repeats: int = 3
    sleeps: Sleeps = dataclasses.field(default_factory=Sleeps)
    rules: Sequence[ConfirmedRule] = RULES

    def __post_init__(self) -> None:
        if not self.workers or not all(2 <= workers <= MOST_WORKERS for workers in self.workers):
            raise SettingError("workers", f"must be from 2 to {MOST_WORKERS}, one of them slow; got {self.workers!r}.")
        check_number("confirm_seconds", self.seconds, 1, 3600, unit="seconds")
        check_integer("confirm_repeats", self.repeats, 1, 100)

    @property
    def runs(self) -> int:
        """The number of real runs."""
        return self.repeats * len(self.rules) * len(self.workers)

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

    def compare(self, on_run: Callable[[], object] = lambda: None) -> list[Comparison]:
        """Makes all real runs and simulations, and returns their comparisons.

        Args:
          on_run: called after each real run.

        Raises:
          LaunchError: a server did not start.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        with (
            LocalCluster(max(self.workers), 1) as cluster,
            # One step per call: with several, only the first would be dispatched.
            ParameterServerStrategy(cluster.resolver, options=Options(steps_per_dispatch=1)) as strategy,
        ):
            settings = [(rule, workers) for rule in self.rules for workers in self.workers]
            steps = [RealSteps(strategy, rule, workers, self.sleeps) for rule, workers in settings]
            runs: list[list[Run]] = [[] for _ in settings]
            # They take turns, so that other load of the machine affects all of them.
            for _ in range(self.repeats):
                for each, of_each in zip(steps, runs, strict=True):
                    of_each.append(each.run(self.seconds))
                    on_run()
        return [_comparison(rule, workers, each) for (rule, workers), each in zip(settings, runs, strict=True)]

    def __str__(self) -> str:
        return (
            f"{', '.join(rule.name for rule in self.rules)}; {', '.join(map(str, self.workers))} workers, the last one "
            f"slow; steps sleep {self.sleeps}; {self.repeats} runs of {self.seconds:g} s"
        )


def _comparison(rule: ConfirmedRule, workers: int, runs: Sequence[Run]) -> Comparison:
    times = StepTimes.of(runs)
    return Comparison(
        rule.name,
        workers,
        Figures.of_runs(runs, workers),
        simulate(times.setting(rule.simulated(workers))),
        [Figures.of_runs([run], workers) for run in runs],
        times,
    )
