"""Batches that workers make for themselves, until every worker has come to the end of its own."""

from typing import Any

from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler
from coordinator.ps_strategy.keras_fit.worker_feed import WorkerFeed
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset

# One runs and one waits, so that a worker does not wait for the client.
_STEPS_PER_WORKER = 2


class FiniteWorkerFeed(WorkerFeed):
    """Steps that take the next batches of a certain worker, which has not come to their end.

    A worker that is lost is awaited, for its data is its own (`Options.affinity_timeout`); it begins anew.

    Args:
      dataset: a per-worker dataset.
      strategy: what is scheduled on.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Scheduler) -> None:
        super().__init__(dataset, strategy)
        self._ended: set[int | None] = set()
        self._newest: Any = None

    def schedule(self, steps: ModelSteps) -> Any:
        """Returns when one more call has taken batches; meanwhile it keeps the workers busy. See `Feed`."""
        while True:
            self._keep_busy(steps)
            if not len(self._in_flight):
                raise StopIteration
            if self._has_taken(steps.steps_per_call):
                return self._newest

    def _keep_busy(self, steps: ModelSteps) -> None:
        """Gives each worker that has batches left as many calls as it may have."""
        present = self._in_flight.count_by_worker()
        for worker in self._strategy.cluster.workers:
            if worker.index in self._ended:
                continue
            for _ in range(_STEPS_PER_WORKER - present[worker.index]):
                future = self._strategy.schedule(steps.of_next_if_any, args=(self._iterator,), worker=worker.index)
                self._in_flight.add(future, worker.index)

    def _has_taken(self, expected: int) -> bool:
        """Waits for the next call to finish: whether it found any batches."""
        (taken, result), worker = self._in_flight.wait_one()
        if taken < expected:
            self._ended.add(worker)
        if taken:
            self._newest = result
        return bool(taken)
