"""A cluster of the core on a fake runtime, closed when the test ends."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT

OPTIONS = Options(
    heartbeat_interval=0.05, reconnect_interval=0.001, transient_retries=3, max_attempts=3, close_timeout=LIMIT
)


@contextlib.contextmanager
def running_scheduler(runtime: FakeRuntime, options: Options = OPTIONS) -> Iterator[Scheduler]:
    """Runs on `runtime` until the block ends."""
    with contextlib.closing(Scheduler(runtime, runtime, options)) as scheduler:
        yield scheduler


def index_of(worker: int) -> int:
    """Work that returns the index of the worker that runs it."""
    return worker


def unhealthy(scheduler: Scheduler) -> tuple[str, ...]:
    """Returns the names of the workers that cannot be given closures now."""
    return tuple(worker.device for worker in scheduler.cluster.workers if not worker.healthy())


def run_on_threads(run: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Calls `run` with each number, all at once; raises what one of the calls raises."""
    numbers = list(numbers)
    with ThreadPoolExecutor(len(numbers)) as pool:
        for running in [pool.submit(run, number) for number in numbers]:
            running.result(2 * LIMIT)
