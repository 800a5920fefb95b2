"""What was seen of a simulated cluster: arrays, and what they come to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.quantity import shown_seconds
from coordinator.simulation.rules.rule import Course
from coordinator.simulation.server_queues import ServerQueues
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.simulation.timeline import Lane

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class QueueStatistics:
    """How messages had to wait at the rule's home server.

    Attributes:
      utilization: the share of the time that it served, from 0 to 1.
      mean_length: how many messages were there when one more came, on average.
      longest: the most.
      mean_wait: what a message waited before it was served, in seconds.
    """

    utilization: float
    mean_length: float
    longest: int
    mean_wait: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What was seen. Times are in seconds of virtual time, staleness in updates.

    Attributes:
      setting: what was simulated.
      seconds: how long.
      gradients: how many were computed, by all workers together.
      updates: how often the model was changed: its version.
      rejected: gradients that were not taken.
      push_times, push_workers, staleness: of every push, in the order of arrival: when (float64), by whom (int64),
        how stale (int64). Rejected ones included; under model averaging, averagings; delayed ones when applied.
      clocks: the steps that each worker has finished; int64 [workers].
      computed, waited, absent: what each worker spent computing, waiting because of the rule, and dead; float64
        [workers]. The rest is communication and dispatch.
      queue: how messages waited at the servers.
      lanes: what some workers did and when.
      loss_times, loss_pushes, losses: the loss curve: when (float64), after how many pushes (int64), and the loss
        (float64); empty where nothing is learned.
      events, processor_seconds: of the simulation itself: how many, and what they cost.
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
    lanes: tuple[Lane, ...]
    loss_times: Array
    loss_pushes: Array
    losses: Array
    events: int
    processor_seconds: float

    @classmethod
    def of(
        cls,
        *,
        setting: Setting,
        seconds: float,
        workers: Sequence[SimulatedWorker],
        record: PushRecord,
        course: Course,
        servers: ServerQueues,
        curve: Sequence[tuple[float, int, float]],
        **counted: Any,
    ) -> "Result":
        """Makes it of what a cluster had at its end."""
        messages = max(servers.messages, 1)
        loss_times, loss_pushes, losses = np.array(curve, dtype=float).reshape(-1, 3).T
        return cls(
            setting=setting,
            seconds=seconds,
            updates=course.version,
            rejected=course.rejected,
            push_times=np.array(record.times),
            push_workers=np.array(record.workers, dtype=np.int64),
            staleness=np.array(record.staleness, dtype=np.int64),
            clocks=np.array([worker.clock for worker in workers]),
            computed=np.array([worker.computed for worker in workers]),
            waited=np.array([worker.waited for worker in workers]),
            absent=np.array([worker.absent for worker in workers]),
            queue=QueueStatistics(
                # What it has taken in may take it longer than was watched.
                min(servers.busy / seconds, 1.0) if seconds else 0.0,
                servers.found / messages,
                servers.longest,
                servers.queued / messages,
            ),
            lanes=tuple(worker.lane for worker in workers if worker.lane),
            loss_times=loss_times,
            loss_pushes=loss_pushes.astype(np.int64),
            losses=losses,
            **counted,
        )

    @property
    def updates_per_second(self) -> float:
        """Changes of the model in a second of virtual time."""
        return self.updates / self.seconds if self.seconds else 0.0

    @property
    def gradients_per_second(self) -> float:
        """Gradients that were computed and not rejected, in a second of virtual time."""
        return (self.gradients - self.rejected) / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """Of all pushes; 0 if there was none."""
        return float(self.staleness.mean()) if self.staleness.size else 0.0

    @property
    def max_staleness(self) -> int:
        """The largest; 0 if there was no push."""
        return int(self.staleness.max(initial=0))

    @property
    def p99_staleness(self) -> int:
        """What 99 of 100 pushes do not exceed."""
        return self.staleness_percentile(99)

    def staleness_percentile(self, percent: float) -> int:
        """The least staleness that so many of 100 pushes do not exceed; 0 if there was none."""
        if not self.staleness.size:
            return 0
        return int(np.percentile(self.staleness, percent, method="inverted_cdf"))

    @property
    def staleness_counts(self) -> Array:
        """How many pushes there were at each staleness, from 0 on; int64."""
        return np.bincount(self.staleness)

    @property
    def idle_shares(self) -> Array:
        """The share of its time, while alive, that each worker waited because of the rule; float64 [workers]."""
        return self.waited / self._alive

    @property
    def idle_share(self) -> float:
        """Of all workers together, from 0 to 1."""
        return float(self.waited.sum() / self._alive.sum())

    @property
    def compute_share(self) -> float:
        """The share of the time of all workers together that they computed, from 0 to 1."""
        return float(self.computed.sum() / self._alive.sum())

    @property
    def communicate_share(self) -> float:
        """What is neither computing nor waiting, from 0 to 1."""
        return max(0.0, 1.0 - self.idle_share - self.compute_share)

    @property
    def rejected_share(self) -> float:
        """Of the gradients that were computed, from 0 to 1."""
        return self.rejected / max(self.gradients, 1)

    @property
    def events_per_second(self) -> float:
        """How many events were simulated in a second of the processor's time."""
        return self.events / max(self.processor_seconds, 1e-9)

    @property
    def _alive(self) -> Array:
        return np.maximum(self.seconds - self.absent, 1e-12)

    def throughput(self, bins: int = 60) -> tuple[Array, Array]:
        """Pushes per second of virtual time, over time.

        Args:
          bins: into how many parts the time is cut, at least 1.

        Returns:
          The middle of each part, in seconds, and the rate in it; float64 [bins].
        """
        counts, edges = np.histogram(self.push_times, bins=bins, range=(0.0, self.seconds or 1.0))
        return (edges[:-1] + edges[1:]) / 2, counts / np.diff(edges)

    def summary(self) -> dict[str, float]:
        """The main figures by name, of which `--json` writes a record."""
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
            f"idle {self.idle_share:.1%}, in {shown_seconds(self.seconds)}>"
        )
