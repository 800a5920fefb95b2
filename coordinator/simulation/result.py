"""The result of a simulation as arrays, figures, texts and a trace."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from coordinator.events.trace import TraceFile
from coordinator.simulation.distribution import format_seconds
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_tasks import Activity, QueueStatistics, Timeline
from coordinator.updates.settings import UNBOUNDED

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of a simulation. Times are in seconds of virtual time, staleness in updates.

    Attributes:
      setting: the simulated setting.
      seconds: the simulated time.
      gradients: the number of gradients that all workers computed.
      updates: the number of updates of the model, which is the model's version.
      rejected: the number of gradients that the rule rejected.
      push_times, push_workers, staleness: the time (float64), the worker (int64) and the staleness (int64) of every
        push, in the order of arrival; [pushes]. Rejected gradients are included. Under model averaging, the averagings
        count as pushes. Delayed gradients are included when they are applied.
      clocks: the steps that each worker has finished; int64 [workers].
      computed, waited, absent: the time that each worker spent computing, waiting because of the rule, and dead;
        float64 [workers]. The rest is communication and dispatch.
      queue: how messages waited at the servers.
      timelines: the activities of some workers.
      loss_times, loss_pushes, losses: the loss curve: times (float64), numbers of pushes until then (int64), and losses
        (float64). The arrays are empty if nothing is learned.
      events, processor_seconds: the number of events of the simulation, and the processor time that they took.
    """

    setting: Setting
    seconds: float
    gradients: int
    updates: int
    rejected: int
    push_times: Array
    push_workers: Array
    staleness: Array
    clocks: Array
    computed: Array
    waited: Array
    absent: Array
    queue: QueueStatistics
    timelines: tuple[Timeline, ...]
    loss_times: Array
    loss_pushes: Array
    losses: Array
    events: int
    processor_seconds: float

    @property
    def updates_per_second(self) -> float:
        """Updates per second of virtual time."""
        return self.updates / self.seconds if self.seconds else 0.0

    @property
    def gradients_per_second(self) -> float:
        """Gradients that were not rejected, per second of virtual time."""
        return (self.gradients - self.rejected) / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all pushes; 0 without pushes."""
        return float(self.staleness.mean()) if self.staleness.size else 0.0

    @property
    def max_staleness(self) -> int:
        """The largest staleness; 0 without pushes."""
        return int(self.staleness.max(initial=0))

    @property
    def p99_staleness(self) -> int:
        """The 99th percentile of the staleness; 0 without pushes."""
        return self.staleness_percentile(99)

    def staleness_percentile(self, percent: float) -> int:
        """Returns a percentile of the staleness, which is a value that occurred, or 0 without pushes."""
        if not self.staleness.size:
            return 0
        return int(np.percentile(self.staleness, percent, method="inverted_cdf"))

    @property
    def staleness_counts(self) -> Array:
        """The number of pushes at each staleness, from 0 on; int64."""
        return np.bincount(self.staleness)

    @property
    def idle_shares(self) -> Array:
        """The share of each worker's lifetime in which the rule made the worker wait; float64 [workers]."""
        return self.waited / self._alive

    @property
    def idle_share(self) -> float:
        """The share of all workers' time in which the rule made them wait, from 0 to 1."""
        return float(self.waited.sum() / self._alive.sum())

    @property
    def compute_share(self) -> float:
        """The share of all workers' time in which they computed, from 0 to 1."""
        return float(self.computed.sum() / self._alive.sum())

    @property
    def communicate_share(self) -> float:
        """The share of all workers' time in which they neither computed nor waited, from 0 to 1."""
        return max(0.0, 1.0 - self.idle_share - self.compute_share)

    @property
    def rejected_share(self) -> float:
        """The share of gradients that were rejected, from 0 to 1."""
        return self.rejected / max(self.gradients, 1)

    @property
    def events_per_second(self) -> float:
        """The number of events simulated per second of processor time."""
        return self.events / max(self.processor_seconds, 1e-9)

    @property
    def _alive(self) -> Array:
        return np.maximum(self.seconds - self.absent, 1e-12)

    def throughput(self, bins: int = 60) -> tuple[Array, Array]:
        """Returns the pushes per second over virtual time.

        Args:
          bins: the number of intervals of the time, at least 1.

        Returns:
          The middle of each interval in seconds, and the rate in the interval; both float64 [bins].
        """
        counts, edges = np.histogram(self.push_times, bins=bins, range=(0.0, self.seconds or 1.0))
        return (edges[:-1] + edges[1:]) / 2, counts / np.diff(edges)

    def summary(self) -> dict[str, float]:
        """Returns the main figures by name, as `--json` writes them."""
        figures = {
            "seconds": self.seconds,
            "gradients": self.gradients,
            "updates": self.updates,
            "updates_per_second": self.updates_per_second,
            "gradients_per_second": self.gradients_per_second,
            "rejected_share": self.rejected_share,
            "mean_staleness": self.mean_staleness,
            "median_staleness": self.staleness_percentile(50),
            "p99_staleness": self.p99_staleness,
            "max_staleness": self.max_staleness,
            "idle_share": self.idle_share,
            "compute_share": self.compute_share,
            "communicate_share": self.communicate_share,
            "server_utilization": self.queue.utilization,
            "queue_mean_length": self.queue.mean_length,
            "queue_longest": self.queue.longest,
            "queue_mean_wait": self.queue.mean_wait,
            "events": self.events,
            "events_per_second": self.events_per_second,
        }
        if self.losses.size:
            figures["final_loss"] = float(self.losses[-1])
        return figures

    def __repr__(self) -> str:
        setting = self.setting
        return (
            f"<Result: {setting.workers} workers, {setting.ps} ps, {setting.rule}: "
            f"{self.updates_per_second:.4g} updates/s, {self.gradients_per_second:.4g} gradients/s, "
            f"staleness mean {self.mean_staleness:.3g}, p99 {self.p99_staleness}, max {self.max_staleness}, "
            f"idle {self.idle_share:.1%}, in {format_seconds(self.seconds)}>"
        )


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns the first column of a table to the left and all other columns to the right, with a line below the head.

    Returns a text without a line end after the last line. Raises ValueError if a row and the head differ in length.
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
    """Returns the figures of one cluster, one per line, without a line end after the last line."""
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
    """Yields sentences of advice about one result. Yields nothing if nothing stands out."""
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
    """Returns a table of the figures of several clusters, without a line end after the last line.

    `head` is the title of the first column. `results` has the label of each cluster in this column, and its result.
    """
    columns = dict(_COLUMNS)
    if any(result.losses.size for _, result in results):
        columns["loss"] = lambda result: f"{result.losses[-1]:.4g}"
    rows = [[label, *(cell(result) for cell in columns.values())] for label, result in results]
    return aligned([head, *columns], rows)


# Maps the title of a column to a function that returns the text of a cell.
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


_NAMES = {Activity.COMPUTE: "compute", Activity.WAIT: "wait for the rule", Activity.DEAD: "lost"}


def write_trace(result: Result, path: str | os.PathLike[str]) -> None:
    """Writes timelines and pushes to a trace file, up to the time until which all timelines are complete.

    An existing file is overwritten. Raises OSError if the file cannot be written.
    """
    end = min([result.seconds, *(timeline.known_until for timeline in result.timelines)])
    file = TraceFile(path, f"simulation, {result.setting.rule}", 2)
    file.instant("ps 0", "the trace begins", 0.0)
    for timeline in result.timelines:
        track = f"worker {timeline.worker}"
        file.instant(track, "the trace begins", 0.0)
        for span in timeline.spans:
            if span.start < end:
                file.slice(track, _NAMES[span.activity], span.start, min(span.end, end) - span.start)
    pushes = zip(result.push_times.tolist(), result.push_workers.tolist(), result.staleness.tolist(), strict=True)
    for at, worker, staleness in itertools.takewhile(lambda push: push[0] <= end, pushes):
        file.instant("ps 0", "push", at, {"worker": worker, "staleness": staleness})
    count = max(1, int(np.searchsorted(result.push_times, end)) // 20)
    counts, edges = np.histogram(result.push_times, bins=min(count, 100), range=(0.0, end))
    for number, at, seconds in zip(counts.tolist(), edges[:-1].tolist(), np.diff(edges).tolist(), strict=True):
        file.counter("finished per second", at, {"finished": round(number / seconds, 1)})
    file.close()
