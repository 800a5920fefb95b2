"""The results of an experiment as files in a folder: all losses, a summary as a table and in words, and pictures."""

import csv
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation import picture
from coordinator.simulation.text_report import aligned
from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, SYNCHRONOUS, Experiment, missing, worker_count
from coordinator.testbed.findings import findings
from coordinator.testbed.loss_curve import HEIGHT, WINDOW, LossCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES, TABLE, SUMMARY = "losses.csv", "summary.csv", "summary.txt"


class Report:
    """Writes the files into a folder. What would prevent that is detected when the report is created.

    Args:
      experiment: the settings.
      folder: for the files; created if it does not exist.

    Raises:
      SettingError: the folder cannot be created.
      LaunchError: matplotlib is not installed.
    """

    def __init__(self, experiment: Experiment, folder: pathlib.Path) -> None:
        self._experiment = experiment
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError("output", f"cannot be created: {error}") from error
        try:
            picture.new_figure(1, 1)
        except SettingError:
            raise missing("matplotlib") from None

    def write(self, curves: Sequence[LossCurve]) -> list[str]:
        """Writes all files.

        Args:
          curves: of the trials that have ended, at least one.

        Returns:
          The names of the files.

        Raises:
          SettingError: a picture cannot be written.
          OSError: a table cannot be written.
        """
        self._write_rows(LOSSES, ["mode", "workers", "delay_s", "batch", "loss", "smoothed_loss"], self._losses(curves))
        head = ["mode", "workers", "delay_s", "spikes", "final_loss", "batches_to_target", "mean_staleness", "seconds"]
        self._write_rows(TABLE, head, self._figures(curves))
        (self._folder / SUMMARY).write_text(self.text(curves) + "\n", encoding="utf-8")
        names = [LOSSES, TABLE, SUMMARY]
        for workers in sorted({curve.trial.workers for curve in curves}):
            if shown := shown_with(curves, workers):
                names.append(f"loss_{worker_count(workers).replace(' ', '_')}.png")
                picture.save(draw_losses(shown, workers, self._experiment), self._folder / names[-1])
        return names

    def text(self, curves: Sequence[LossCurve]) -> str:
        """Returns the summary: the settings, a table, the meaning of its columns, and the paper's findings."""
        target = self._experiment.target_loss
        head = ["training", "spikes", "final loss", f"batches to {target:g}", "staleness", "seconds"]
        rows = [
            [
                str(curve.trial),
                str(curve.spikes),
                f"{curve.final_loss:.3f}",
                str(curve.batches_to(target) or "never"),
                f"{curve.mean_staleness:.1f}",
                f"{curve.seconds:.1f}",
            ]
            for curve in curves
        ]
        total = len(self._experiment.trials())
        return "\n".join(
            [
                str(self._experiment),
                *([f"Stopped after {len(curves)} of {total} trainings."] if len(curves) < total else []),
                "",
                aligned(head, rows),
                "",
                f"Losses are smoothed, the mean of {WINDOW} minibatches. Spikes: rises by more than {HEIGHT:g}.",
                "Final loss: the mean of the last tenth of the minibatches.",
                f"Batches: how many were processed when the loss was first below {target:g}.",
                "Staleness: of gradients when they are applied, in updates, the mean.",
                "",
                "The paper's findings:",
                *(str(finding) for finding in findings(curves, target)),
            ]
        )

    def _losses(self, curves: Sequence[LossCurve]) -> Iterable[list[object]]:
        for curve in curves:
            trial = curve.trial
            for number, (loss, smoothed) in enumerate(zip(curve.losses, curve.smoothed, strict=True), start=1):
                yield [trial.mode, trial.workers, trial.delay, number, f"{loss:.6g}", f"{smoothed:.6g}"]

    def _figures(self, curves: Sequence[LossCurve]) -> Iterable[list[object]]:
        for curve in curves:
            trial = curve.trial
            reached = curve.batches_to(self._experiment.target_loss)
            figures = [f"{value:.6g}" for value in (curve.mean_staleness, curve.seconds)]
            yield [trial.mode, trial.workers, trial.delay, curve.spikes, f"{curve.final_loss:.6g}", reached, *figures]

    def _write_rows(self, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        with (self._folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)


# Higher losses are cut off, in multiples of that of guessing: one training that diverged must not flatten all others.
_MOST_GUESSES = 3.0
_GUESSING = math.log(10)


def shown_with(curves: Sequence[LossCurve], workers: int) -> list[LossCurve]:
    """Returns the curves in the picture of a number of workers: those with as many workers, and the sequential one.

    Returns:
      The curves; none if there is only the sequential one.
    """
    of_workers = [curve for curve in curves if curve.trial.workers == workers and curve.trial.mode != SEQUENTIAL]
    return [curve for curve in curves if curve.trial.mode == SEQUENTIAL] + of_workers if of_workers else []


def draw_losses(curves: Sequence[LossCurve], workers: int, experiment: Experiment) -> "Figure":
    """Draws the losses against the processed minibatches, a line for each curve.

    With two and three workers these are the paper's Figures 5 and 6.

    Args:
      curves: those of `shown_with`.
      workers: the number of workers.
      experiment: the settings.

    Raises:
      SettingError: matplotlib is not installed.
    """
    figure = picture.new_figure(10, 5.6)
    axes = figure.subplots()
    delays = [curve for curve in curves if curve.trial.mode == ASYNCHRONOUS]
    for curve in curves:
        batches = np.arange(1, len(curve.losses) + 1)
        axes.plot(batches, curve.smoothed, **_style(curve, delays.index(curve) if curve in delays else 0))
    highest = max(float(np.nanmax(curve.smoothed)) for curve in curves)
    axes.axhline(
        experiment.target_loss, color="grey", linewidth=1, linestyle=":", label=f"loss of {experiment.target_loss:g}"
    )
    axes.set(
        title=f"{worker_count(workers)}, {experiment.data}, steps of {experiment.step_time:g} s",
        xlabel=f"processed minibatches (of {experiment.batch_size} images)",
        ylabel=f"training loss (cross entropy in nats, mean of {WINDOW} minibatches)",
        ylim=(0, min(1.05 * highest, _MOST_GUESSES * _GUESSING)),
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _style(curve: LossCurve, number: int) -> dict[str, Any]:
    """Returns the style of a line: both its color and its marker identify it."""
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 6}
    if curve.trial.mode == SEQUENTIAL:
        return {**style, "color": picture.BLACK, "linestyle": "--", "label": SEQUENTIAL}
    if curve.trial.mode == SYNCHRONOUS:
        return {**style, "color": picture.SKY, "linestyle": "-.", "label": SYNCHRONOUS}
    shown = (picture.GREEN, picture.BLUE, picture.ORANGE, picture.RED, picture.PURPLE)
    every = max(len(curve.losses) // 12, 1)
    return {
        **style,
        "color": shown[number % len(shown)],
        "marker": picture.MARKERS[number % len(picture.MARKERS)],
        "markevery": (number * every // 6, every),
        "label": f"{ASYNCHRONOUS}, delay {curve.trial.delay:g} s",
    }
