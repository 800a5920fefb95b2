"""Pictures of one cluster, of several clusters side by side, and of a sweep. The pictures need matplotlib."""

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation.result import Result
from coordinator.simulation.simulated_tasks import Activity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
# The colors of the lines, in order. Each line also has its own marker.
SERIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

COMPUTE, COMMUNICATE, WAIT = BLUE, SKY, ORANGE
_ACTIVITY_COLORS = {Activity.COMPUTE: COMPUTE, Activity.WAIT: WAIT, Activity.DEAD: BLACK}
# For each use of a worker's time: the label in legends, the color, and the attribute of `Result` with the share.
_USES = (
    ("compute", COMPUTE, "compute_share"),
    ("communicate", COMMUNICATE, "communicate_share"),
    ("wait for the rule", WAIT, "idle_share"),
)
# The number of steps of an average worker that timelines show.
_STEPS_SHOWN = 12


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches. Raises SettingError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingError("plot", "needs matplotlib: pip install 'coordinator-tf[plots]'.") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Writes a figure in the format of the path's suffix. Raises SettingError if the figure cannot be written."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise SettingError("plot", f"cannot be written to {path}: {error}") from error


def picture(result: Result) -> "Figure":
    """Draws one cluster: timelines of some workers, the staleness, the throughput, and the loss."""
    figure = new_figure(11, 7.5)
    below = ["staleness", "throughput", *(["loss"] if result.losses.size else [])]
    mosaic: Any = [["timelines"] * len(below), below]
    axes = figure.subplot_mosaic(mosaic, height_ratios=[1.15, 1])
    setting = result.setting
    figure.suptitle(
        f"{setting.workers} workers, {setting.ps} ps, {setting.rule}: {result.updates_per_second:.4g} updates/s"
    )
    draw_timelines(axes["timelines"], result)
    draw_staleness(axes["staleness"], result)
    middles, rates = result.throughput()
    axes["throughput"].step(middles, rates, where="mid", color=BLUE)
    axes["throughput"].set(
        title="Throughput", xlabel="time [s]", ylabel="pushes per second", xlim=(0, result.seconds), ylim=(0, None)
    )
    if result.losses.size:
        draw_losses(axes["loss"], [("", result)])
    for name in below:
        axes[name].grid(alpha=0.3)
    return figure


def comparison(results: Sequence[tuple[str, Result]]) -> "Figure":
    """Draws several clusters side by side: speed, staleness, the use of the workers' time, and losses."""
    is_learning = any(result.losses.size for _, result in results)
    height = 1.4 + 0.6 * len(results)
    figure = new_figure(12, height + 3.2 * is_learning)
    names = ["speed", "staleness", "time"]
    mosaic: Any = [names, ["loss"] * 3] if is_learning else [names]
    axes = figure.subplot_mosaic(mosaic, height_ratios=[height, 3.2] if is_learning else None)
    rows = np.arange(len(results))
    labels = [label.replace("(", "\n(", 1) for label, _ in results]
    axes["speed"].barh(rows, [result.gradients_per_second for _, result in results], color=BLUE)
    axes["speed"].set(title="Speed", xlabel="gradients used per second", yticks=rows, yticklabels=labels)
    means = [result.mean_staleness for _, result in results]
    p99s = [result.p99_staleness for _, result in results]
    axes["staleness"].hlines(rows, means, p99s, color=BLACK, linewidth=1)
    axes["staleness"].plot(means, rows, "o", color=BLUE, label="mean staleness")
    axes["staleness"].plot(p99s, rows, "|", color=RED, markersize=14, markeredgewidth=3, label="99th percentile")
    axes["staleness"].set(title="Staleness", xlabel="updates", yticks=rows, yticklabels=[])
    axes["staleness"].set_xlim(-0.03 * max(*p99s, 1), None)
    left = np.zeros(len(results))
    for label, color, share in _USES:
        shares = np.array([100 * getattr(result, share) for _, result in results])
        axes["time"].barh(rows, shares, left=left, color=color, label=label)
        left += shares
    axes["time"].set(title="Workers' time", xlabel="share [%]", yticks=rows, yticklabels=[], xlim=(0, 100))
    for name in names:
        axes[name].set_ylim(len(results) - 0.5, -0.5)
        axes[name].grid(alpha=0.3, axis="x")
        axes[name].set_axisbelow(True)
    figure.legend(loc="outside lower right", ncols=5, frameon=False)
    if is_learning:
        draw_losses(axes["loss"], results)
        axes["loss"].grid(alpha=0.3)
    return figure


def scaling(name: str, values: Sequence[int], series: Sequence[tuple[str, Sequence[Result]]]) -> "Figure":
    """Draws a sweep: speed, staleness and the workers' time against the setting `name`, with a line for each rule.

    `series` has the name of each rule, and the rule's result at each value.
    """
    figure = new_figure(13, 4.6)
    speed, staleness, shares = figure.subplots(1, 3)
    for number, (label, results) in enumerate(series):
        style = _style(number)
        dotted = {"color": style["color"], "linestyle": ":"}
        speed.plot(values, [result.gradients_per_second for result in results], label=label, **style)
        staleness.plot(values, [result.mean_staleness for result in results], **style)
        staleness.plot(values, [result.p99_staleness for result in results], **dotted)
        shares.plot(values, [100 * result.compute_share for result in results], **style)
        shares.plot(values, [100 * result.idle_share for result in results], **dotted)
    if name == "workers":
        first = max(results[0].gradients_per_second for _, results in series)
        ideal = [first * value / values[0] for value in values]
        speed.plot(values, ideal, color="grey", linestyle="--", linewidth=1, label="linear scaling")
        speed.set_yscale("log", base=2)
        speed.yaxis.set_major_formatter("{x:g}")
    else:
        speed.set_ylim(0, None)
    speed.set(title="Speed", ylabel="gradients used per second")
    staleness.set(title="Staleness: mean; dotted: 99th percentile", ylabel="updates", ylim=(0, None))
    title = "Worker time: compute (solid), wait for the rule (dotted)"
    shares.set(title=title, ylabel="share of their time [%]", ylim=(-2, 102))
    for axes in (speed, staleness, shares):
        _scale(axes, values)
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    speed.legend()
    return figure


def draw_timelines(axes: Any, result: Result) -> None:
    """Draws the timelines of some workers, one per row."""
    # The timelines show some steps, and all deaths.
    deaths = [span.end for timeline in result.timelines for span in timeline.spans if span.activity is Activity.DEAD]
    until = max(_STEPS_SHOWN * result.seconds / max(float(result.clocks.mean()), 1.0), 1.1 * max(deaths, default=0.0))
    until = min(result.seconds, until, *(timeline.known_until for timeline in result.timelines))
    for row, timeline in enumerate(result.timelines):
        axes.barh(row, until, left=0, height=0.8, color=COMMUNICATE)
        spans = [span for span in timeline.spans if span.start < until]
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in spans],
            (row - 0.4, 0.8),
            facecolors=[_ACTIVITY_COLORS[span.activity] for span in spans],
            # White edges separate steps that follow each other without a gap.
            edgecolors="white",
            linewidths=0.4,
        )
    shown = [(label, color) for label, color, _ in _USES]
    if deaths:
        shown.append(("dead", BLACK))
    handles = [axes.barh(0, 0, color=color, label=label) for label, color in shown]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=len(shown), frameon=False)
    axes.set(
        title=f"Timelines of {len(result.timelines)} of {result.setting.workers} workers, start of the run",
        xlabel="time [s]",
        ylabel="worker",
        yticks=range(len(result.timelines)),
        yticklabels=[timeline.worker for timeline in result.timelines],
        xlim=(0, until),
        ylim=(len(result.timelines) - 0.5, -0.5),
    )


def draw_staleness(axes: Any, result: Result) -> None:
    """Draws a histogram of the staleness, with its mean and 99th percentile."""
    counts = result.staleness_counts
    shares = 100 * counts / max(counts.sum(), 1)
    last = max(result.staleness_percentile(99.9), 1)
    width = math.ceil((last + 1) / 60)
    edges = np.arange(0, last + width + 1, width)
    binned = [shares[start : start + width].sum() for start in edges[:-1]]
    axes.bar(edges[:-1] + (width - 1) / 2, binned, width=0.9 * width, color=BLUE)
    axes.axvline(result.mean_staleness, color=ORANGE, linewidth=2, label=f"mean {result.mean_staleness:.3g}")
    label = f"99th percentile {result.p99_staleness}"
    axes.axvline(result.p99_staleness, color=RED, linewidth=2, linestyle="--", label=label)
    axes.legend()
    per = "" if width == 1 else f" (bars of {width})"
    axes.set(title="Staleness", xlabel=f"updates between pull and push{per}", ylabel="share of pushes [%]")
    # Leave room for the legend.
    axes.set_ylim(0, 1.35 * (max(binned) or 1.0))


def draw_losses(axes: Any, results: Sequence[tuple[str, Result]]) -> None:
    """Draws losses over virtual time, one line per result."""
    for number, (label, result) in enumerate(results):
        every = max(len(result.losses) // 8, 1)
        axes.plot(result.loss_times, result.losses, markevery=(number, every), label=label or None, **_style(number))
    if any(label for label, _ in results):
        axes.legend(ncols=2)
    axes.set(title="Loss", xlabel="time [s]", ylabel="loss")


def _style(number: int) -> dict[str, Any]:
    """Returns the style of a line. Later lines have smaller markers, so that earlier lines stay visible."""
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": max(10 - 2 * number, 4),
        "linewidth": 1.8,
    }


def _scale(axes: Any, values: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    has_zero = 0 in values
    axes.set_xscale("symlog" if has_zero else "log", base=2)
    axes.set_xlim(-0.3 if has_zero else values[0] / 1.3, values[-1] * 1.3 + has_zero)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(values), [str(value) for value in values], rotation=45 if len(values) > 6 else 0)
