"""The result of a simulation: arrays, and figures that are computed from them."""

import dataclasses
from typing import Any

import numpy as np

from coordinator.simulation.quantity import format_seconds
from coordinator.simulation.server_queues import QueueStatistics
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_worker import Timeline

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of a simulation. Times are in seconds of virtual time, staleness in updates.

    Attributes:
      setting: what was simulated.
      seconds: the time that was simulated.
      gradients: the number of gradients that all workers computed.
      updates: the number of updates of the model: its version.
      rejected: the number of gradients that the rule rejected.
      push_times, push_workers, staleness: the time (float64), the worker (int64) and the staleness (int64) of every
        push, in the order of arrival; [pushes]. Rejected gradients are included. Under model averaging these are the
        averagings; delayed gradients are included when they are applied.
      clocks: the steps that each worker has finished; int64 [workers].
      computed, waited, absent: the time that each worker spent computing, waiting because of the rule, and dead;
        float64 [workers]. The rest is communication and dispatch.
      queue: how messages waited at the servers.
      timelines: the activities of some workers.
      loss_times, loss_pushes, losses: the loss curve: times (float64), pushes until then (int64), and losses (float64);
        empty if nothing is learned.
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
        """Returns a percentile of the staleness: a value that occurred; 0 without pushes."""
        if not self.staleness.size:
            return 0
        return int(np.percentile(self.staleness, percent, method="inverted_cdf"))

    @property
    def staleness_counts(self) -> Array:
        """The number of pushes at each staleness, from 0 on; int64."""
        return np.bincount(self.staleness)

    @property
    def idle_shares(self) -> Array:
        """The share of its lifetime that each worker waited because of the rule; float64 [workers]."""
        return self.waited / self._alive

    @property
    def idle_share(self) -> float:
        """The share of all workers' time that they waited because of the rule, from 0 to 1."""
        return float(self.waited.sum() / self._alive.sum())

    @property
    def compute_share(self) -> float:
        """The share of all workers' time that they computed, from 0 to 1."""
        return float(self.computed.sum() / self._alive.sum())

    @property
    def communicate_share(self) -> float:
        """The share of all workers' time that they neither computed nor waited, from 0 to 1."""
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
          The middle of each interval, in seconds, and the rate in it; both float64 [bins].
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
