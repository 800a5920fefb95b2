"""A load on the core alone, in a separate process, so that its memory and threads are measured alone.

    python -m benchmarks.core_load busy 256 20000     workers, closures: closures of 1 ms are scheduled and joined
    python -m benchmarks.core_load loop 256 20000     the same calls by threads without a queue
    python -m benchmarks.core_load runs 256 500000    workers, runs: one future for many runs of an empty function
    python -m benchmarks.core_load queued 1000000     closures wait in the queue behind one that does not end

It prints a JSON object: for the first three `wall`, `cpu` (seconds of a closure or run) and `switches` (how often a
thread waited, for a closure or run); for the last `bytes` (of memory, for a closure), `schedule_p50` and `schedule_p99`
(seconds).
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from coordinator.options import Options
from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler

CLOSURE_SECONDS = 0.001


def busy(workers: int, closures: int) -> dict[str, float]:
    """Schedules closures of 1 ms at once, and joins."""
    with _scheduler(FakeRuntime(workers)) as scheduler:
        # All threads have started and taken from the queue.
        _spread(scheduler, workers)

        def run() -> None:
            for _ in range(closures):
                scheduler.schedule(_work, "work")
            scheduler.join()

        return _costs(run, closures)


def loop(workers: int, closures: int) -> dict[str, float]:
    """Makes the same calls on as many threads, which share nothing but a count."""
    left = threading.Semaphore(closures)

    def run_on(worker: int) -> None:
        while left.acquire(blocking=False):
            _work(worker)

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        list(threads.map(_work, range(workers)))
        return _costs(lambda: list(threads.map(run_on, range(workers))), closures)


def runs(workers: int, count: int) -> dict[str, float]:
    """Schedules many runs of an empty function with one future, and waits for their results."""
    key = FusionKey("nothing", None)
    with _scheduler(FakeRuntime(workers)) as scheduler:
        _spread(scheduler, workers)
        return _costs(lambda: scheduler.schedule(_nothing, "nothing", steps=count, fusion_key=key).result(), count)


def queued(closures: int) -> dict[str, float]:
    """Queues closures behind one that does not end."""
    runtime = FakeRuntime(1)
    gate = Gate(runtime)
    with _scheduler(runtime, Options(max_queued_closures=closures + 1)) as scheduler:
        scheduler.schedule(gate, "gate")
        gate.wait_arrived()
        seconds = [0.0] * closures
        before = _resident_bytes()
        for number in range(closures):
            began = time.perf_counter()
            scheduler.schedule(_work, "work")
            seconds[number] = time.perf_counter() - began
        # The list was allocated before; the floats in it were not.
        weight = _resident_bytes() - before - closures * sys.getsizeof(0.0)
    return {
        "bytes": weight / closures,
        "schedule_p50": float(np.percentile(seconds, 50)),
        "schedule_p99": float(np.percentile(seconds, 99)),
    }


LOADS: dict[str, Callable[..., dict[str, float]]] = {"busy": busy, "loop": loop, "runs": runs, "queued": queued}


def main() -> None:
    """Runs one load and prints its cost."""
    print(json.dumps(LOADS[sys.argv[1]](*map(int, sys.argv[2:]))))


def _work(_: int) -> None:
    time.sleep(CLOSURE_SECONDS)


def _nothing(_: int) -> None:
    pass


@contextlib.contextmanager
def _scheduler(runtime: FakeRuntime, options: Options | None = None) -> Iterator[Scheduler]:
    with contextlib.closing(Scheduler(runtime, runtime, options or Options())) as scheduler:
        yield scheduler


def _spread(scheduler: Scheduler, workers: int) -> None:
    for worker in range(workers):
        scheduler.schedule(_work, "work", worker=worker)
    scheduler.join()


def _costs(run: Callable[[], object], closures: int) -> dict[str, float]:
    waits, cpu, wall = _waits(), time.process_time(), time.perf_counter()
    run()
    return {
        "wall": (time.perf_counter() - wall) / closures,
        "cpu": (time.process_time() - cpu) / closures,
        "switches": (_waits() - waits) / closures,
    }


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
