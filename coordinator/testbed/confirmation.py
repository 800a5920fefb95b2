"""Compares the simulator with real servers that run the same rules with the same times.

    sleeps --> real steps --+--> what the rule counted --> real figures -----------.
                            |                                                      +--> a table, and reasons
                            '--> what each part took ----> simulated figures ------'

The simulator is given the measured times of the parts of real steps. The simulator has to predict how long workers
wait, how stale gradients are, and how many are accepted. A second comparison is of real and simulated loss curves.
"""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coordinator.errors import SettingError
from coordinator.options import Options, check_integer, check_number
from coordinator.simulation import picture
from coordinator.simulation.result import Result, aligned
from coordinator.simulation.rules import Asynchronous, BoundedDelay, ModelAverage, Rule, StaleSynchronous, Synchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.experiment import MOST_WORKERS, Experiment, Trial, worker_count
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.measurement import measure, new_progress_bar, new_strategy
from coordinator.testbed.results import WINDOW, LossCurve, TrialResult, results_of
from coordinator.testbed.step_times import Run, Sleeps, StepTimes


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of real runs, with the names and units of a simulation's `Result`."""

    mean_staleness: float
    p99_staleness: int
    updates_per_second: float
    idle_share: float

    @classmethod
    def of_runs(cls, runs: Sequence[Run], workers: int) -> "Figures":
        from coordinator.updates.rule_state import Staleness

        seconds = sum(run.seconds for run in runs)
        staleness = Staleness(tuple(map(int, np.sum([run.histogram for run in runs], axis=0))))
        return cls(
            staleness.mean,
            staleness.p99,
            sum(run.updates for run in runs) / seconds,
            sum(run.waited for run in runs) / (workers * seconds),
        )


# Figures in which a simulation must agree with real runs -> their names in texts.
_JUDGED = {"mean_staleness": "mean staleness", "updates_per_second": "updates/s"}
# The largest relative difference of figures that agree.
TOLERANCE = 0.1
# If real workers wait for more than this share of the time, their waiting is given as a reason for a difference.
_MUCH_IDLE = 0.02


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One setting, real and simulated. `name` is the rule and the number of workers; the last worker is slow.

    `real` has the figures over all real runs, `repeated` has the figures of each run. The simulator got the `times`.
    """

    name: str
    real: Figures
    simulated: Figures | Result
    repeated: Sequence[Figures]
    times: StepTimes

    def off_by(self, figure: str) -> float:
        """Returns the relative difference of a simulated figure to the real one."""
        real, simulated = getattr(self.real, figure), getattr(self.simulated, figure)
        if real == simulated:
            return 0.0
        return (simulated - real) / real if real else math.inf

    @property
    def agrees(self) -> bool:
        return all(abs(self.off_by(figure)) <= TOLERANCE for figure in _JUDGED)


# The columns of the table: title, name of the figure, and format.
_COLUMNS = (
    ("staleness", "mean_staleness", ".2f"),
    ("p99", "p99_staleness", "g"),
    ("updates/s", "updates_per_second", ".2f"),
    ("idle", "idle_share", ".1%"),
)


def table(comparisons: Sequence[Comparison]) -> str:
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
    """Returns how many comparisons agree, and why the others do not, one per line."""
    agreeing = sum(comparison.agrees for comparison in comparisons)
    lines = [
        f"{agreeing} of {len(comparisons)} settings agree within {TOLERANCE:.0%} in mean staleness and in updates/s."
    ]
    for comparison in comparisons:
        if comparison.agrees:
            continue
        parts = []
        for figure, words in _JUDGED.items():
            if abs(comparison.off_by(figure)) <= TOLERANCE:
                continue
            values = [getattr(each, figure) for each in comparison.repeated]
            is_noise = min(values) <= getattr(comparison.simulated, figure) <= max(values)
            why = "the simulated value is " + ("in that range: within noise" if is_noise else "outside that range")
            off = f"{words} {comparison.off_by(figure):+.0%}"
            parts.append(f"{off}; the real runs had {min(values):.2f} to {max(values):.2f}, {why}")
        if comparison.real.idle_share > _MUCH_IDLE:
            parts.append("a real worker that waits may begin while the gradient that it waited for is being applied")
        lines.append(f"{comparison.name}: {'; '.join(parts)}.")
    return "\n".join(lines)


# Name in tables -> the rule for a number of workers.
RULES: Mapping[str, Callable[[int], Rule]] = {
    "async": lambda _: Asynchronous(),
    "sync": Synchronous,
    "SSP": lambda _: StaleSynchronous(get_model_frequency=2, max_lead=2),
    "bounded delay": lambda _: BoundedDelay(max_delay=3),
    "model average": lambda _: ModelAverage(),
}
_SLEEPS = Sleeps()


def confirm(given: Mapping[str, Any]) -> None:
    """Runs the command. `given` has the options by name, with None for options that were not given.

    Raises:
      SettingError: an option is wrong.
      LaunchError: tqdm is not installed, or a server did not start.
      Exception: an error of `ParameterServerStrategy.join`.
    """
    confirmation = Confirmation.of(given)
    print(confirmation, flush=True)
    load = os.getloadavg()[0]
    with new_progress_bar(confirmation.runs, "run") as progress:
        comparisons = confirmation.compare(progress.update)

    print(f"{os.cpu_count()} cpus, load {load:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end")
    print(f"\nMean times of real steps, which the simulator was given:\n\n{times_table(comparisons)}")
    print(f"\nReal, and simulated:\n\n{table(comparisons)}\n\n{verdict(comparisons)}", flush=True)


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """The settings to compare. Raises SettingError if a setting is not allowed.

    A real run takes `seconds`. A setting's `repeats` runs are added up for the comparison. `workers` are at least 2.
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
        return self.repeats * len(RULES) * len(self.workers)

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Confirmation":
        """Parses the options: `workers` as text, `confirm_seconds`, `confirm_repeats`; None if not given.

        Raises SettingError if an option is wrong, or is for experiments only.
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
        """Makes all real runs and simulations; returns their comparisons. Calls `on_run` after each real run.

        Raises LaunchError if a server did not start, and the errors of `ParameterServerStrategy.join`.
        """
        settings = [(name, rule(workers), workers) for name, rule in RULES.items() for workers in self.workers]
        runs: list[list[Run]] = [[] for _ in settings]
        # Each call has one step. If a call had several steps, only the first one would be dispatched.
        with new_strategy(max(self.workers), Options(steps_per_dispatch=1)) as strategy:
            from coordinator.testbed.real_steps import RealSteps

            steps = [RealSteps(strategy, rule, workers, _SLEEPS) for _, rule, workers in settings]
            # The settings run in turn, so that other load of the machine affects all settings.
            for _ in range(self.repeats):
                for each, of_each in zip(steps, runs, strict=True):
                    of_each.append(each.run(self.seconds))
                    on_run()
        comparisons = []
        for (name, rule, workers), of_each in zip(settings, runs, strict=True):
            times, real = StepTimes.of(of_each), Figures.of_runs(of_each, workers)
            repeated = [Figures.of_runs([run], workers) for run in of_each]
            simulated = simulate(times.setting(rule))
            comparisons.append(Comparison(f"{name}, {workers}", real, simulated, repeated, times))
        return comparisons

    def __str__(self) -> str:
        return (
            f"{', '.join(RULES)}; {', '.join(map(str, self.workers))} workers, the last one slow; "
            f"steps sleep {_SLEEPS}; {self.repeats} runs of {self.seconds:g} s"
        )


class LossComparison(NamedTuple):
    """The results of one trial, real and simulated, with the same seeds."""

    real: TrialResult
    simulated: TrialResult


def compare(experiment: Experiment, data: ImageData) -> list[LossComparison]:
    """Runs all trials on real servers, then again in virtual time with the times of the real steps.

    Raises LaunchError if a server did not start, and the errors of `ParameterServerStrategy.join`.
    """
    real: list[LossCurve] = []
    simulated: list[LossCurve] = []
    measure(dataclasses.replace(experiment, simulated=False), data, real.append)

    from coordinator.testbed.runner import rule_of

    def setting_of(trial: Trial) -> Setting:
        runs = [curve.run for curve in real if curve.trial == trial and curve.run is not None]
        return StepTimes.of(runs).setting(rule_of(trial))

    measure(dataclasses.replace(experiment, simulated=True), data, simulated.append, setting_of)
    return [LossComparison(*pair) for pair in zip(results_of(real), results_of(simulated), strict=True)]


def difference(comparisons: Sequence[LossComparison]) -> float:
    """Returns the mean absolute difference between real and simulated losses, as a share of the mean real loss."""
    real = np.concatenate([each.real.smoothed for each in comparisons])
    simulated = np.concatenate([each.simulated.smoothed for each in comparisons])
    return float(np.sum(np.abs(real - simulated)) / np.sum(real))


def text(experiment: Experiment, comparisons: Sequence[LossComparison]) -> str:
    """Returns a table with a row for each trial, the meaning of its columns, and the verdict."""
    head = ["training", "final loss", "simulated", "staleness", "simulated", "difference"]
    rows = []
    for each in comparisons:
        row = [str(each.real.trial)]
        for name, form in (("final_loss", ".3f"), ("mean_staleness", ".1f")):
            row += [f"{result.mean(name):{form}}" for result in each]
        rows.append([*row, f"{difference([each]):.1%}"])
    found = difference(comparisons)
    verdict = "within" if found <= TOLERANCE else "not within"
    runs = "" if experiment.repeats == 1 else f", of the means of {experiment.repeats} runs"
    return "\n".join(
        [
            str(dataclasses.replace(experiment, simulated=False)),
            "",
            aligned(head, rows),
            "",
            f"Difference: the mean absolute difference of the losses, each the mean of {WINDOW} minibatches{runs},",
            "as a share of the mean real loss.",
            f"Over the grid the loss curves differ by {found:.1%}: they agree {verdict} {TOLERANCE:.0%}.",
        ]
    )


def draw(comparisons: Sequence[LossComparison], folder: pathlib.Path) -> list[str]:
    """Draws a picture for each number of workers into a folder; returns their names.

    Raises SettingError if matplotlib is not installed, or a picture cannot be written.
    """
    names = []
    of_workers = sorted(comparisons, key=lambda each: each.real.trial.workers)
    colours = (picture.BLACK, picture.SKY, picture.GREEN, picture.BLUE, picture.ORANGE, picture.RED, picture.PURPLE)
    for workers, group in itertools.groupby(of_workers, key=lambda each: each.real.trial.workers):
        figure = picture.new_figure(10, 5.6)
        axes = figure.subplots()
        for each, colour in zip(group, itertools.cycle(colours), strict=False):
            batches = np.arange(1, len(each.real.smoothed) + 1)
            axes.plot(batches, each.real.smoothed, color=colour, linewidth=1.6, label=str(each.real.trial))
            axes.plot(batches, each.simulated.smoothed, color=colour, linewidth=1.6, linestyle="--")
        axes.plot([], [], color="grey", linestyle="--", label="simulated")
        axes.set(
            title=f"{worker_count(workers)}: real servers (solid) and virtual time (dashed)",
            xlabel="processed minibatches",
            ylabel=f"training loss (nats, mean of {WINDOW} minibatches)",
            ylim=(0, None),
            xlim=(0, None),
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        names.append(f"simulated_{worker_count(workers).replace(' ', '_')}.png")
        picture.save(figure, folder / names[-1])
    return names
