"""What users see of the workers: `strategy.cluster`."""

import dataclasses
from collections.abc import Callable, Sequence

from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.statistics import ClusterStatistics
from coordinator.workers.worker import Worker
from coordinator.workers.worker_pool import WorkerPool


class Cluster:
    """The workers of a strategy and their statistics; adds, moves and removes workers while training runs.

    Args:
      pool: has the workers.
      queue: counts what they do.
      fail_orphaned: fails the closures that only a removed worker could run.
      refuse_worker_thread: raises RuntimeError on a worker's thread, where the named method would wait for itself.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queue: ClosureQueue,
        fail_orphaned: Callable[[int], None],
        refuse_worker_thread: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._fail_orphaned = fail_orphaned
        self._refuse_worker_thread = refuse_worker_thread

    @property
    def workers(self) -> Sequence[Worker]:
        """The present workers, in the order of their indices."""
        return tuple(worker for _, worker in sorted(self._pool.workers.items()))

    def statistics(self) -> ClusterStatistics:
        """Returns a snapshot of the counts, each worker's too."""
        workers = tuple(worker.statistics() for worker in self.workers)
        return dataclasses.replace(self._queue.statistics(), workers=workers)

    def add_worker(self, address: str) -> int:
        """Adds a worker. It gets closures as soon as it answers.

        It creates its own iterators, tables and per-worker variables when it first needs them.

        Args:
          address: `host:port` of a standard TensorFlow server that was started as a worker.

        Returns:
          Its index: the lowest that no worker has.

        Raises:
          ValueError: that is no address, or a task of the cluster has it already.
          StrategyClosedError: the strategy is closed.
        """
        return self._pool.add_worker(address)

    def remove_worker(self, index: int, timeout: float | None = None) -> None:
        """Removes a worker after it has finished what it runs, or after `timeout`; the closure is requeued then.

        Closures that only it may run fail with `WorkerLost`.

        Args:
          index: its index.
          timeout: in seconds; None for `Options.close_timeout`.

        Raises:
          ValueError: there is no such worker.
        """
        self._refuse_worker_thread("remove_worker")
        self._pool.remove_worker(index, timeout)
        self._fail_orphaned(index)

    def move_worker(self, index: int, address: str) -> None:
        """Changes the address of a worker, whose present closure is requeued.

        Args:
          index: its index.
          address: `host:port` of the server.

        Raises:
          ValueError: there is no such worker, that is no address, or another task has it.
        """
        self._pool.move_worker(index, address)

    def __repr__(self) -> str:
        return f"<Cluster: {self.statistics()}>"
