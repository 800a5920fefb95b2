"""Creates and reads the copies of per-worker resources, on all workers at once."""

import weakref
from typing import Any

from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerContext
from coordinator.workers.scheduler import Scheduler


class WorkerCopies:
    """Schedules the library's own work with resources, before what its users have scheduled.

    Args:
      scheduler: has the workers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def create(self, resource: PerWorkerResource) -> None:
        """Makes every worker create its copy, unless the resource is dropped before; does not wait for it."""
        reference = weakref.ref(resource)

        def create(context: WorkerContext) -> None:
            if (wanted := reference()) is not None:
                wanted.value_on(context)

        for worker in self._scheduler.cluster.workers:
            self._scheduler.schedule_internal(worker.index, create, f"create {resource.name}")

    def read(self, resource: PerWorkerResource) -> list[Any]:
        """Returns the values of all copies, which are variables, in the order of the workers, as NumPy."""
        reads = [
            self._scheduler.schedule_internal(worker.index, resource.read_on, f"read {resource.name}")
            for worker in self._scheduler.cluster.workers
        ]
        return [read.result() for read in reads]
