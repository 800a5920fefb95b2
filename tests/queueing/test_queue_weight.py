"""Tests of the memory of a waiting closure, and that its cost does not grow with the number of workers."""

import gc
import tracemalloc

from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import index_of, running_scheduler

CLOSURES = 4_000


def test_a_waiting_closure_takes_less_than_500_bytes_with_its_future() -> None:
    runtime = FakeRuntime(1)
    gate = Gate(runtime)
    with running_scheduler(runtime, Options()) as scheduler:
        scheduler.schedule(gate, "gate")
        gate.wait_arrived()
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(CLOSURES):
                scheduler.schedule(index_of, "step")
            weight, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert weight / CLOSURES < 500
        gate.open()
        scheduler.join(LIMIT)
