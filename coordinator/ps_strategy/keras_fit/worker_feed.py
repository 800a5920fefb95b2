"""Batches that workers make for themselves, each with an iterator of its own."""

from typing import Any, NoReturn

from coordinator.ps_strategy.keras_fit.feed import Feed
from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset


class WorkerFeed(Feed):
    """Steps that take the next batches of whichever worker runs them.

    Args:
      dataset: a per-worker dataset.
      strategy: what is scheduled on.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Scheduler) -> None:
        super().__init__(strategy)
        self._iterator = iter(dataset)

    def __next__(self) -> NoReturn:
        """Refused: only `predict` asks for a batch."""
        raise ValueError(
            "predict cannot take a dataset function or a per-worker dataset: there would be no order in its outputs. "
            "Give it a tf.data.Dataset or arrays, or schedule a function that predicts."
        )

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        self._in_flight.add(self._strategy.schedule(steps.of_next, args=(self._iterator,)))
        self._in_flight.wait_room()
        return self._in_flight.newest_result
