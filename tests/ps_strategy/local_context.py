"""A worker that is this process: for what runs on workers, without any."""

from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager
from coordinator.runtime import Builds

CPU = "/device:CPU:0"


def local_context(
    worker: int = 0, connection_number: int = 1, cancellation: CancellationManager | None = None
) -> WorkerContext:
    """Returns the context of such a worker."""
    return WorkerContext(worker, CPU, CPU, connection_number, cancellation or CancellationManager(), Builds())
