"""The picture of a number of workers: the loss against the minibatches that were processed, a line for each training.

With two and three workers they are the paper's Figures 5 and 6.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.simulation import colours
from coordinator.simulation.picture import new_figure
from coordinator.testbed.cell import ASYNCHRONOUS, SEQUENTIAL, SYNCHRONOUS, worker_count
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.loss_curve import WINDOW, Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Higher losses are cut off, so that one training that is lost does not flatten all others: in multiples of guessing.
_MOST_GUESSES = 3.0
_GUESSING = math.log(10)


def shown_with(curves: Sequence[Curve], workers: int) -> list[Curve]:
    """What the picture of a number of workers shows: all trainings with as many, and the sequential one beside them.

    None, if there are none but the sequential one.
    """
    of_workers = [curve for curve in curves if curve.cell.workers == workers and curve.cell.mode != SEQUENTIAL]
    return [curve for curve in curves if curve.cell.mode == SEQUENTIAL] + of_workers if of_workers else []


def draw(curves: Sequence[Curve], workers: int, experiment: Experiment) -> "Figure":
    """Draws them.

    Args:
      curves: what `shown_with` gives.
      workers: the number.
      experiment: what was tried.

    Raises:
      SettingError: matplotlib is not installed.
    """
    figure = new_figure(10, 5.6)
    axes = figure.subplots()
    delays = [curve for curve in curves if curve.cell.mode == ASYNCHRONOUS]
    for curve in curves:
        batches = np.arange(1, len(curve.losses) + 1)
        axes.plot(batches, curve.smoothed, **_style(curve, delays.index(curve) if curve in delays else 0))
    highest = max(float(np.nanmax(curve.smoothed)) for curve in curves)
    axes.axhline(experiment.target_loss, color="grey", linewidth=1, linestyle=":", label=_target(experiment))
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


def _target(experiment: Experiment) -> str:
    return f"loss of {experiment.target_loss:g}"


def _style(curve: Curve, number: int) -> dict[str, Any]:
    """Of a line: colours and markers that are told apart without each other."""
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 6}
    if curve.cell.mode == SEQUENTIAL:
        return {**style, "color": colours.BLACK, "linestyle": "--", "label": SEQUENTIAL}
    if curve.cell.mode == SYNCHRONOUS:
        return {**style, "color": colours.SKY, "linestyle": "-.", "label": SYNCHRONOUS}
    shown = (colours.GREEN, colours.BLUE, colours.ORANGE, colours.RED, colours.PURPLE)
    every = max(len(curve.losses) // 12, 1)
    return {
        **style,
        "color": shown[number % len(shown)],
        "marker": colours.MARKERS[number % len(colours.MARKERS)],
        "markevery": (number * every // 6, every),
        "label": f"{ASYNCHRONOUS}, delay {curve.cell.delay:g} s",
    }
