"""What was scheduled for an epoch: what has not finished yet, and the newest result of what has."""

import logging
import queue
import time
from collections import Counter
from typing import Any

from coordinator.future import Future
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler

_logger = logging.getLogger("coordinator")
# In seconds.
_STALL_REPORT_INTERVAL = 60.0


class StepsInFlight:
    """A few calls at a time for each worker: enough to keep all busy, so few that what callbacks are told is recent.

    It is for one thread.

    Args:
      strategy: what they are scheduled on.
      per_worker: how many there may be for each worker.
    """

    def __init__(self, strategy: Scheduler, per_worker: int = 4) -> None:
        self._strategy = strategy
        self._per_worker = per_worker
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._workers: dict[Future, int | None] = {}
        self.newest_result: Any = None

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, future: Future, worker: int | None = None) -> None:
        """Counts one more call, for any worker or for a certain one."""
        self._workers[future] = worker
        future.add_done_callback(self._finished.put)  # type: ignore[arg-type]  # it gives this very future

    def count_by_worker(self) -> Counter[int | None]:
        """How many calls are for which worker."""
        return Counter(self._workers.values())

    def wait_room(self) -> None:
        """Returns when there is room for one more, and when at least one call has told its result.

        Raises:
          Exception: what failed.
        """
        while len(self) >= self._per_worker * len(self._strategy.cluster.workers):
            self.wait_one()
        while not self._finished.empty() or (self.newest_result is None and self._workers):
            self.wait_one()

    def wait_one(self) -> tuple[Any, int | None]:
        """Waits for the next call to finish.

        Returns:
          What it returned, and the worker that it was for.

        Raises:
          Exception: what failed.
        """
        future = self._next_finished()
        worker = self._workers.pop(future)
        if future.cancelled() or future.exception() is not None:
            self._raise_failure(future)
        self.newest_result = future.result()
        return self.newest_result, worker

    def wait_finished(self) -> None:
        """Returns when none is left; what they told is forgotten.

        Raises:
          Exception: what failed.
        """
        while self._workers:
            self.wait_one()
        self.newest_result = None

    def _raise_failure(self, future: Future) -> None:
        self._workers.clear()
        # It raises the first failure, which may be of another call than this.
        self._strategy.join()
        future.result()

    def _next_finished(self) -> Future:
        began = time.monotonic()
        while True:
            try:
                return self._finished.get(timeout=_STALL_REPORT_INTERVAL)
            except queue.Empty:
                _logger.warning(
                    "No step has finished for %.0f s, of %d that were scheduled: %s.",
                    time.monotonic() - began,
                    len(self),
                    self._strategy.cluster.statistics(),
                )
