"""Results as text: a summary and advice for one cluster, a table for several."""

from collections.abc import Callable, Iterator, Sequence

from coordinator.simulation.quantity import format_seconds
from coordinator.simulation.result import Result
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous
from coordinator.updates.settings import UNBOUNDED


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns a table: the first column to the left, all others to the right, with a line below the head.

    Args:
      head: a title for each column.
      rows: the cells of each row, one for each title.

    Returns:
      The lines, without an end of line after the last.

    Raises:
      ValueError: a row has another number of cells.
    """
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"The table has {len(head)} columns, and a row has {len(row)} cells: {list(row)}.")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    first, *others = widths
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    ruler = ["-" * width for width in widths]
    return "\n".join(line.format(*cells).rstrip() for cells in (head, ruler, *rows))


def summary(result: Result) -> str:
    """Returns the figures of one cluster, a line each, without an end of line after the last."""
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
            f"a message waits {format_seconds(queue.mean_wait)}",
        ),
        *([("loss", f"from {result.losses[0]:.4g} to {result.losses[-1]:.4g}")] if result.losses.size else ()),
        (
            "simulated",
            f"{format_seconds(result.seconds)}, {result.gradients:,} gradients, {result.events:,} events at "
            f"{result.events_per_second:,.0f} /s",
        ),
    ]
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in lines)


# Shares that are worth a remark.
_MUCH = 0.3
_NEARLY_ALL = 0.9


def advice(result: Result) -> Iterator[str]:
    """Yields sentences of advice about one result, if something stands out."""
    rule, workers = result.setting.rule, result.setting.workers
    if isinstance(rule, BoundedDelay) and result.idle_share > _MUCH and rule.largest_delay < UNBOUNDED:
        most = (rule.largest_delay + 1) * rule.grads_to_wait
        if most < workers:
            yield (
                f"max_delay counts updates, grads_to_wait is {rule.grads_to_wait}: so at most {most} of {workers} "
                f"workers can be under way. With --grads-to-wait workers it counts rounds of all workers."
            )
        else:
            yield f"Workers wait {result.idle_share:.0%} of their time for the slowest: try a larger --max-delay."
    if isinstance(rule, StaleSynchronous) and result.idle_share > _MUCH:
        yield (
            f"Workers wait {result.idle_share:.0%} of their time for the slowest: with a lead of at most "
            f"{rule.max_lead} steps all end up at its pace. A larger --max-lead only puts that off."
        )
    if result.rejected_share > _MUCH:
        yield (
            f"{result.rejected_share:.0%} of all gradients were computed for nothing: try fewer --grads-to-wait, or "
            f"a rule that rejects none."
        )
    if result.queue.utilization > _NEARLY_ALL:
        yield (
            f"The parameter servers are busy {result.queue.utilization:.0%} of the time: more workers bring nothing. "
            f"Try more parameter servers, or larger minibatches."
        )


def table(head: str, results: Sequence[tuple[str, Result]]) -> str:
    """Returns a table of the figures of several clusters.

    Args:
      head: the title of the first column.
      results: of each cluster its label in the first column, and its result.

    Returns:
      The lines, without an end of line after the last.
    """
    columns = {**_COLUMNS}
    if any(result.losses.size for _, result in results):
        columns["loss"] = lambda result: f"{result.losses[-1]:.4g}"
    return aligned(
        [head, *columns], [[label, *(cell(result) for cell in columns.values())] for label, result in results]
    )


# By the titles of the columns.
_COLUMNS: dict[str, Callable[[Result], str]] = {
    "updates/s": lambda result: f"{result.updates_per_second:.4g}",
    "gradients/s": lambda result: f"{result.gradients_per_second:.4g}",
    "rejected": lambda result: f"{result.rejected_share:.1%}",
    "staleness": lambda result: f"{result.mean_staleness:.3g}",
    "p99": lambda result: f"{result.p99_staleness}",
    "max": lambda result: f"{result.max_staleness}",
    "compute": lambda result: f"{result.compute_share:.1%}",
    "communicate": lambda result: f"{result.communicate_share:.1%}",
    "wait": lambda result: f"{result.idle_share:.1%}",
}
