"""A cluster of the core on a fake runtime, closed when the test ends."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.future import Future
from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT

OPTIONS = Options(
    heartbeat_interval=0.05, reconnect_interval=0.001, transient_retries=3, max_attempts=3, close_timeout=LIMIT
)


@contextlib.contextmanager
def running_scheduler(
    runtime: FakeRuntime, options: Options = OPTIONS, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Scheduler]:
    """Runs on `runtime` until the block ends."""
    with contextlib.closing(Scheduler(runtime, runtime, options, clock=clock)) as scheduler:
        yield scheduler


def index_of(worker: int) -> int:
    """Work that returns the index of the worker that runs it."""
    return worker


def fail(worker: int) -> None:
    """Work of the user that fails."""
    raise ZeroDivisionError("user's own")


def hold(scheduler: Scheduler, count: int = 1, name: str = "step", **settings: Any) -> tuple[Gate, list[Future]]:
    """Schedules work that waits at a gate, and returns once it has arrived there on as many workers as may run it."""
    gate = Gate(scheduler.servers)  # type: ignore[arg-type]
    futures = [scheduler.schedule(gate, name, **settings) for _ in range(count)]
    gate.wait_arrived(min(count, len(scheduler.cluster.workers) if settings.get("worker") is None else 1))
    return gate, futures


def check_events(scheduler: Scheduler) -> None:
    """Compares the counts of the events with the statistics; no closure may run."""
    scheduler.settled(LIMIT)
    counted: Counter[str] = Counter()
    events = scheduler.queue.events.since(0)[0]
    kinds = Counter(event.kind for event in events)
    for event in events:
        counted[event.kind] += event.count
    statistics = scheduler.cluster.statistics()
    expected = {f"closures_{end}": getattr(statistics, end) for end in ("finished", "failed", "cancelled", "retried")}
    expected["worker_joined"] = len(statistics.workers) + counted["worker_left"]
    if not counted["worker_left"]:
        expected["worker_lost"] = sum(worker.losses for worker in statistics.workers)
        expected["worker_returned"] = sum(worker.reconnections for worker in statistics.workers)
    found = {kind: counted[kind] for kind in expected}
    servers = statistics.parameter_servers
    for kind, count in (
        ("parameter_server_lost", sum(server.losses for server in servers)),
        ("parameter_server_recovered", sum(server.recoveries for server in servers)),
    ):
        found[kind], expected[kind] = kinds[kind], count
    assert found == expected


def unhealthy(scheduler: Scheduler) -> tuple[str, ...]:
    """Returns the names of the workers that cannot be given closures now."""
    return tuple(worker.device for worker in scheduler.cluster.workers if not worker.healthy())


def run_on_threads(run: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Calls `run` with each number, all at once; raises what one of the calls raises."""
    numbers = list(numbers)
    with ThreadPoolExecutor(len(numbers)) as pool:
        for running in [pool.submit(run, number) for number in numbers]:
            running.result(2 * LIMIT)
