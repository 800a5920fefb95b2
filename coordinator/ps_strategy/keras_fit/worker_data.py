"""Data that each worker has for itself, for Keras' loop."""

from coordinator.ps_strategy.keras_fit.finite_worker_feed import FiniteWorkerFeed
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler
from coordinator.ps_strategy.keras_fit.worker_feed import WorkerFeed
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset


class WorkerData:
    """A per-worker dataset, read from the beginning in each of its feeds.

    Args:
      dataset: a per-worker dataset.
      strategy: what is scheduled on.
      is_counted: whether the loop counts the steps of an epoch, which then take from whichever iterator. Otherwise an
        epoch ends when every worker has come to the end of its data.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Scheduler, *, is_counted: bool) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self._feed_class = WorkerFeed if is_counted else FiniteWorkerFeed

    def __iter__(self) -> WorkerFeed:
        return self._feed_class(self._dataset, self._strategy)
