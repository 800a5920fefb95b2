"""Snapshots of the counts of a cluster."""

import dataclasses


@dataclasses.dataclass(slots=True)
class WorkerCounts:
    """Counts of the attempts on one worker; see `WorkerStatistics`."""

    finished: int = 0
    failed: int = 0
    retried: int = 0


@dataclasses.dataclass(frozen=True)
class WorkerStatistics:
    """The counts of one worker.

    Attributes:
      index: the worker's task index.
      device: the worker's name.
      state: `live`, `lost` or `stopped`.
      finished: closures with a result. Each run of `steps=` counts as one closure, also in `failed` and `retried`.
      failed: closures with an error from this worker.
      retried: attempts on this worker after which the closure was requeued.
      losses: how often the worker was lost.
      reconnections: how often the worker was reconnected.
      reconnecting_seconds: the total duration of the attempts that reconnected the worker, in seconds.
    """

    index: int
    device: str
    state: str
    finished: int = 0
    failed: int = 0
    retried: int = 0
    losses: int = 0
    reconnections: int = 0
    reconnecting_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class ParameterServerStatistics:
    """The counts of one parameter server.

    Attributes:
      index: the server's task index.
      device: the server's name.
      state: `live` or `lost`, as last noticed by the library.
      losses: how often the server was lost.
      recoveries: how often the server was recovered.
      away_seconds: the total time from losses to recoveries, in seconds.
    """

    index: int
    device: str
    state: str
    losses: int = 0
    recoveries: int = 0
    away_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class ClusterStatistics:
    """The counts of a cluster. Each run of `schedule(..., steps=)` counts as one closure.

    Attributes:
      waiting: closures that no worker runs, including requeued ones.
      running: closures that a worker runs now.
      finished: closures with a result, including the library's own, such as one that creates a dataset on a worker.
      failed: closures with an error.
      cancelled: closures that were cancelled.
      retried: attempts after which a closure was requeued.
      workers: the statistics of each worker, in index order.
      parameter_servers: the statistics of each parameter server, in index order.
    """

    waiting: int
    running: int
    finished: int
    failed: int
    cancelled: int
    retried: int
    workers: tuple[WorkerStatistics, ...] = ()
    parameter_servers: tuple[ParameterServerStatistics, ...] = ()

    def __str__(self) -> str:
        servers: tuple[WorkerStatistics | ParameterServerStatistics, ...] = (*self.workers, *self.parameter_servers)
        away = [server.device for server in servers if server.state == "lost"]
        lost = f"; lost: {', '.join(away)}" if away else ""
        return (
            f"{self.waiting} waiting, {self.running} running, {self.finished} finished, {self.failed} failed, "
            f"{self.cancelled} cancelled, {self.retried} retried; {len(self.workers)} workers{lost}"
        )
