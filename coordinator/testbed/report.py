"""The results of an experiment as files in a folder: all losses, a summary as a table and in words, and pictures."""

import csv
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation import picture
from coordinator.simulation.result import aligned
from coordinator.testbed.experiment import (
    ASYNCHRONOUS,
    AXES,
    SEQUENTIAL,
    SYNCHRONOUS,
    Experiment,
    delay_text,
    missing,
    worker_count,
)
from coordinator.testbed.results import HEIGHT, WINDOW, LossCurve, TrialResult, findings, results_of, steadiness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REPEATED = (
    "Figures are means of {} runs, each with its own seed, with the standard deviation of the runs; batches and\n"
    "seconds to the loss are medians, with the least and the most."
)
LOSSES, TABLE, SUMMARY = "losses.csv", "summary.csv", "summary.txt"


class Report:
    """Writes the files of an experiment into a folder, which is created if necessary.

    The constructor raises SettingError if the folder cannot be created, LaunchError if matplotlib is not installed.
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
        """Writes all files from the curves, at least one, of runs that have ended; returns the files' names.

        Raises:
          SettingError: a picture cannot be written.
          OSError: a table cannot be written.
        """
        target = self._experiment.target_loss
        head = ["mode", "workers", "delay_s", *AXES, "seed"]
        losses: list[list[object]] = []
        figures: list[list[object]] = []
        for curve in curves:
            trial, axes = curve.trial, [getattr(curve.trial.descent, axis) for axis in AXES]
            run = [trial.mode, trial.workers, trial.delay, *axes, curve.seed]
            columns = zip(curve.times, curve.losses, curve.smoothed, strict=True)
            losses += [[*run, number, *map(_figure, row)] for number, row in enumerate(columns, start=1)]
            own: list[float | None] = [curve.spikes, curve.rise, curve.final_loss, curve.accuracy]
            own += [curve.batches_to(target), curve.seconds_to(target), curve.mean_staleness, curve.seconds]
            figures.append([*run, *map(_figure, own)])
        self._write_rows(LOSSES, [*head, "batch", "time_s", "loss", "smoothed_loss"], losses)
        head += ["spikes", "rise", "final_loss", "accuracy", "batches_to_target", "seconds_to_target"]
        self._write_rows(TABLE, [*head, "mean_staleness", "seconds"], figures)
        (self._folder / SUMMARY).write_text(self.text(curves) + "\n", encoding="utf-8")
        names = [LOSSES, TABLE, SUMMARY]
        results = results_of(curves)
        groups = dict.fromkeys((each.trial.workers, each.trial.descent) for each in results)
        for workers, descent in sorted(groups, key=lambda group: group[0]):
            if shown := shown_with([each for each in results if each.trial.descent == descent], workers):
                name = re.sub(r"[, ]+", "_", f"loss_{worker_count(workers)} {descent.text}".strip())
                for axis, file in ((BATCHES, f"{name}.png"), (TIME, f"{name}_over_time.png")):
                    picture.save(draw_losses(shown, workers, self._experiment, axis), self._folder / file)
                    names.append(file)
        return names

    def text(self, curves: Sequence[LossCurve]) -> str:
        """Returns the summary: the settings, a table, the meaning of its columns, and the paper's findings."""
        target, results = self._experiment.target_loss, results_of(curves)
        repeats = self._experiment.repeats
        total = repeats * len(self._experiment.trials())
        head = ["training", "spikes", "rise", "final loss", "accuracy"]
        head += [f"batches to {target:g}", f"seconds to {target:g}", "staleness", "seconds"]
        rows = [
            [
                str(each.trial),
                each.shown("spikes", "g" if repeats == 1 else ".1f"),
                each.shown("rise", ".2f"),
                each.shown("final_loss", ".3f"),
                each.shown("accuracy", ".1%"),
                each.shown_until(lambda curve: curve.batches_to(target), "g"),
                each.shown_until(lambda curve: curve.seconds_to(target), ".1f"),
                each.shown("mean_staleness", ".1f"),
                f"{each.mean('seconds'):.1f}",
            ]
            for each in results
        ]
        return "\n".join(
            [
                str(self._experiment),
                *([f"Stopped after {len(curves)} of {total} trainings."] if len(curves) < total else []),
                "",
                aligned(head, rows),
                "",
                f"Losses are smoothed, the mean of {WINDOW} minibatches. Spikes: rises by more than {HEIGHT:g};",
                "rise: the heights of all of them together.",
                "Final loss: the mean of the last tenth of the minibatches. Accuracy: on images that were held out.",
                f"Batches, seconds: how many were processed, and how long, until the loss was first below {target:g}.",
                "Staleness: of gradients when they are applied, in updates, the mean.",
                *([_REPEATED.format(repeats)] if repeats > 1 else []),
                "",
                "The paper's findings:",
                *(str(finding) for finding in findings(results, target)),
                *(["", "What steadies the loss:"] if (axes := steadiness(results)) else []),
                *map(str, axes),
            ]
        )

    def _write_rows(self, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        with (self._folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# The horizontal axis of a picture: processed minibatches, or time.
BATCHES, TIME = "batches", "time"
# Losses above this multiple of the loss of guessing are cut off, because they would flatten all other curves.
_MOST_GUESSES = 3.0
_GUESSING = math.log(10)


def shown_with(results: Sequence[TrialResult], workers: int) -> list[TrialResult]:
    """Returns the sequential results, then all others with `workers` workers; an empty list if there are no others."""
    of_workers = [each for each in results if each.trial.workers == workers and each.trial.mode != SEQUENTIAL]
    return [each for each in results if each.trial.mode == SEQUENTIAL] + of_workers if of_workers else []


def draw_losses(results: Sequence[TrialResult], workers: int, experiment: Experiment, axis: str = BATCHES) -> "Figure":
    """Draws the losses over the processed minibatches or the time (BATCHES or TIME), a line for each result.

    With two and three workers, the pictures over minibatches correspond to Figures 5 and 6 of the paper that
    `results.py` names. A band around the mean of several runs extends from the lowest to the highest run. `results` are
    from `shown_with`. Raises SettingError if matplotlib is not installed.
    """
    figure = picture.new_figure(10, 5.6)
    axes = figure.subplots()
    delays = [each for each in results if each.trial.mode == ASYNCHRONOUS]
    for each in results:
        places = each.times if axis == TIME else np.arange(1, len(each.smoothed) + 1)
        style = _style(each, delays.index(each) if each in delays else 0)
        axes.plot(places, each.smoothed, **style)
        if len(each.curves) > 1:
            runs = [curve.smoothed for curve in each.curves]
            axes.fill_between(
                places, np.min(runs, axis=0), np.max(runs, axis=0), color=style["color"], alpha=0.15, lw=0
            )
    highest = max(float(np.nanmax(each.smoothed)) for each in results)
    axes.axhline(
        experiment.target_loss, color="grey", linewidth=1, linestyle=":", label=f"loss of {experiment.target_loss:g}"
    )
    descent = results[0].trial.descent
    virtual = "virtual time" if experiment.simulated else "time"
    axes.set(
        title=f"{worker_count(workers)}, {experiment.data}, steps of {experiment.step_time:g} s"
        + (f", {descent.text}" if descent.text else ""),
        xlabel=f"{virtual} [s]" if axis == TIME else f"processed minibatches (of {descent.batch_size} images)",
        ylabel=f"training loss (cross entropy in nats, mean of {WINDOW} minibatches)",
        ylim=(0, min(1.05 * highest, _MOST_GUESSES * _GUESSING)),
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _style(result: TrialResult, number: int) -> dict[str, Any]:
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 6}
    if result.trial.mode == SEQUENTIAL:
        return {**style, "color": picture.BLACK, "linestyle": "--", "label": SEQUENTIAL}
    if result.trial.mode == SYNCHRONOUS:
        return {**style, "color": picture.SKY, "linestyle": "-.", "label": SYNCHRONOUS}
    shown = (picture.GREEN, picture.BLUE, picture.ORANGE, picture.RED, picture.PURPLE)
    every = max(len(result.smoothed) // 12, 1)
    return {
        **style,
        "color": shown[number % len(shown)],
        "marker": picture.MARKERS[number % len(picture.MARKERS)],
        "markevery": (number * every // 6, every),
        "label": f"{ASYNCHRONOUS}, delay {delay_text(result.trial.delay)} s",
    }
