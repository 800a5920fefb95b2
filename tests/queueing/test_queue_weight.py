"""Tests of the memory of a waiting closure, and that its cost does not grow with the number of workers."""

import gc
import tracemalloc

import pytest

from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import index_of, running_scheduler

CLOSURES = 20_000


@pytest.mark.parametrize("are_kept", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_waiting_closure_takes_less_than_500_bytes_with_its_future(are_kept: bool) -> None:
    runtime = FakeRuntime(1)
    gate = Gate(runtime)
    with running_scheduler(runtime, Options()) as scheduler:
        scheduler.schedule(gate, "gate")
        gate.wait_arrived()
        futures: list[object] = [None] * CLOSURES
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(CLOSURES):
                future = scheduler.schedule(index_of, "step")
                if are_kept:
                    futures[number] = future
            weight, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert weight / CLOSURES < 500
        gate.open()
        scheduler.join(LIMIT)


def test_a_thousand_workers_are_served() -> None:
    with running_scheduler(FakeRuntime(1000), Options()) as scheduler:
        for worker in range(1000):
            scheduler.schedule(index_of, "step", worker=worker)
        futures = [scheduler.schedule(index_of, "step") for _ in range(2000)]
        scheduler.join(LIMIT)
        assert all(future.done() for future in futures)
        assert scheduler.cluster.statistics().finished == 3000
