"""What was seen, as text: a sheet for one cluster, a table for several."""

from collections.abc import Sequence

from coordinator.simulation.aligned_table import aligned
from coordinator.simulation.quantity import shown_seconds
from coordinator.simulation.result import Result

_COLUMNS = (
    "updates/s",
    "gradients/s",
    "rejected",
    "staleness",
    "p99",
    "max",
    "compute",
    "communicate",
    "wait",
)


def sheet(result: Result) -> str:
    """The figures of one cluster, a line each, without an end of line after the last."""
    setting, queue = result.setting, result.queue
    lines = [
        ("cluster", f"{setting.workers} workers, {setting.ps} ps, {setting.rule}"),
        ("updates", f"{result.updates_per_second:.4g} /s"),
        ("gradients", f"{result.gradients_per_second:.4g} /s, and {result.rejected_share:.1%} of all rejected"),
        (
            "staleness",
            f"mean {result.mean_staleness:.3g}, median {result.staleness_percentile(50)}, p99 {result.p99_staleness}, "
            f"max {result.max_staleness}",
        ),
        (
            "workers' time",
            f"compute {result.compute_share:.1%}, communicate {result.communicate_share:.1%}, "
            f"wait for the rule {result.idle_share:.1%}",
        ),
        (
            "home server",
            f"busy {queue.utilization:.1%}, queue mean {queue.mean_length:.2g}, longest {queue.longest}; "
            f"a message waits {shown_seconds(queue.mean_wait)}",
        ),
        *([("loss", f"from {result.losses[0]:.4g} to {result.losses[-1]:.4g}")] if result.losses.size else ()),
        (
            "simulated",
            f"{shown_seconds(result.seconds)}, {result.gradients:,} gradients, {result.events:,} events at "
            f"{result.events_per_second:,.0f} /s",
        ),
    ]
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in lines)


def table(head: str, results: Sequence[tuple[str, Result]]) -> str:
    """The figures of several clusters side by side.

    Args:
      head: the title of the first column.
      results: what the first column says of each, and what was seen.

    Returns:
      The lines, without an end of line after the last.
    """
    is_learning = any(result.losses.size for _, result in results)
    titles = (head, *_COLUMNS, *(("loss",) if is_learning else ()))
    rows = [(label, *_cells(result)) for label, result in results]
    return aligned(titles, rows)


def _cells(result: Result) -> tuple[str, ...]:
    return (
        f"{result.updates_per_second:.4g}",
        f"{result.gradients_per_second:.4g}",
        f"{result.rejected_share:.1%}",
        f"{result.mean_staleness:.3g}",
        f"{result.p99_staleness}",
        f"{result.max_staleness}",
        f"{result.compute_share:.1%}",
        f"{result.communicate_share:.1%}",
        f"{result.idle_share:.1%}",
        *((f"{result.losses[-1]:.4g}",) if result.losses.size else ()),
    )
