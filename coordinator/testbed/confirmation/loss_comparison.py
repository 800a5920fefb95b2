"""Loss curves of real trainings, and of the same trainings in virtual time with the measured times of their steps.

real servers --> losses ------------------------------------.
     |                                                      +--> a table, pictures, and the difference over the grid
     '--> times of steps --> simulated cluster --> losses --'
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.setting import Setting
from coordinator.simulation.text_report import aligned
from coordinator.testbed.experiment import Experiment, Trial, worker_count
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.loss_curve import WINDOW, LossCurve
from coordinator.testbed.measurement import measure
from coordinator.testbed.step_times import StepTimes
from coordinator.testbed.trial_result import TrialResult, results_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The largest difference of loss curves that agree, as a share of the mean loss.
TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """One trial, real and simulated.

    Attributes:
      real, simulated: the curves of its repetitions, as many and with the same seeds; at least one.
    """

    real: Sequence[LossCurve]
    simulated: Sequence[LossCurve]

    @property
    def trial(self) -> Trial:
        """What was trained."""
        return self.real[0].trial

    @property
    def real_losses(self) -> Any:
        """The mean of the smoothed losses of the real repetitions, float64 [batches]."""
        return TrialResult(self.real).smoothed

    @property
    def simulated_losses(self) -> Any:
        """The same of the simulated ones."""
        return TrialResult(self.simulated).smoothed

    @property
    def difference(self) -> float:
        """The mean absolute difference of the two."""
        return float(np.mean(np.abs(self.real_losses - self.simulated_losses)))

    @property
    def share(self) -> float:
        """The difference as a share of the mean real loss."""
        return self.difference / float(np.mean(self.real_losses))


def compare(experiment: Experiment, data: ImageData) -> list[LossComparison]:
    """Runs all trials on real servers, then again in virtual time with the times of the real steps.

    Args:
      experiment: the grid.
      data: the images.

    Raises:
      LaunchError: a server did not start.
      Exception: what `ParameterServerStrategy.join` raises.
    """
    real: list[LossCurve] = []
    simulated: list[LossCurve] = []
    measure(dataclasses.replace(experiment, simulated=False), data, real.append)

    from coordinator.testbed.simulated_runner import rule_of

    def setting_of(trial: Trial) -> Setting:
        runs = [curve.run for curve in real if curve.trial == trial and curve.run is not None]
        return StepTimes.of(runs).setting(rule_of(trial))

    measure(dataclasses.replace(experiment, simulated=True), data, simulated.append, setting_of)
    pairs = zip(results_of(real), results_of(simulated), strict=True)
    return [LossComparison(on_servers.curves, in_virtual_time.curves) for on_servers, in_virtual_time in pairs]


def over_grid(comparisons: Sequence[LossComparison]) -> float:
    """Returns the mean absolute difference of all minibatches of all trials, as a share of their mean real loss."""
    sums = [(each.difference * len(each.real_losses), float(np.sum(each.real_losses))) for each in comparisons]
    differences, losses = zip(*sums, strict=True)
    return sum(differences) / sum(losses)


def text(experiment: Experiment, comparisons: Sequence[LossComparison]) -> str:
    """Returns a table with a row for each trial, the meaning of its columns, and the verdict."""
    head = ["training", "final loss", "simulated", "staleness", "simulated", "difference"]
    rows = []
    for each in comparisons:
        row = [str(each.trial)]
        for name, form in (("final_loss", ".3f"), ("mean_staleness", ".1f")):
            row += [f"{TrialResult(curves).mean(name):{form}}" for curves in (each.real, each.simulated)]
        rows.append([*row, f"{each.share:.1%}"])
    found = over_grid(comparisons)
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
    """Draws a picture for each number of workers into a folder, and returns their names.

    Raises:
      SettingError: matplotlib is not installed, or a picture cannot be written.
    """
    names = []
    of_workers = sorted(comparisons, key=lambda each: each.trial.workers)
    for workers, group in itertools.groupby(of_workers, key=lambda each: each.trial.workers):
        names.append(f"simulated_{worker_count(workers).replace(' ', '_')}.png")
        picture.save(_draw(list(group), workers), folder / names[-1])
    return names


def _draw(comparisons: Sequence[LossComparison], workers: int) -> "Figure":
    figure = picture.new_figure(10, 5.6)
    axes = figure.subplots()
    colours = itertools.cycle(
        (picture.BLACK, picture.SKY, picture.GREEN, picture.BLUE, picture.ORANGE, picture.RED, picture.PURPLE)
    )
    for each, colour in zip(comparisons, colours, strict=False):
        batches = np.arange(1, len(each.real_losses) + 1)
        axes.plot(batches, each.real_losses, color=colour, linewidth=1.6, label=str(each.trial))
        axes.plot(batches, each.simulated_losses, color=colour, linewidth=1.6, linestyle="--")
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
    return figure
