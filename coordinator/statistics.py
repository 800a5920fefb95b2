"""Snapshots of what a cluster has done and is doing."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerStatistics:
    """What one worker has done.

    Attributes:
      index: its task index.
      device: its name.
      state: `live`, `lost` or `stopped`.
      finished: closures that gave a result here.
      failed: closures that ended with an error here.
      retried: attempts here after which the closure was handed back, to run again unless another one failed meanwhile.
      losses: how often the worker was lost.
      reconnections: how often it was connected to again.
      reconnecting_seconds: time spent in making those connections, in seconds.
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
class ClusterStatistics:
    """What all workers have done, and what is queued.

    Attributes:
      waiting: closures that no worker has taken, those handed back included.
      running: closures that a worker runs now.
      finished: closures that gave a result.
      failed: closures that ended with an error.
      cancelled: closures that were withdrawn.
      retried: attempts after which a closure was handed back to run again.
      workers: the same for each worker, by index.
    """

    waiting: int
    running: int
    finished: int
    failed: int
    cancelled: int
    retried: int
    workers: tuple[WorkerStatistics, ...] = ()

    def __str__(self) -> str:
        away = [worker.device for worker in self.workers if worker.state == "lost"]
        lost = f"; lost and awaited: {', '.join(away)}" if away else ""
        return (
            f"{self.waiting} waiting, {self.running} running, {self.finished} finished, {self.failed} failed, "
            f"{self.cancelled} cancelled, {self.retried} retried; {len(self.workers)} workers{lost}"
        )
