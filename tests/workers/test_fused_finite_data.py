"""Tests of which closures share calls when they take data that ends."""

import pytest

from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import running_scheduler
from tests.workers.finite_data import FiniteData
from tests.workers.fusible_steps import FOUR, behind_a_gate, results


def test_a_call_takes_no_more_elements_than_its_worker_has_left() -> None:
    runtime, data = FakeRuntime(1), FiniteData(range(10))
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = [data.schedule(scheduler) for _ in range(13)]
        gate.open()
        assert results(futures[:10]) == list(range(10))
        assert all(isinstance(future.exception(LIMIT), EndOfDataError) for future in futures[10:])
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
    assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]


def test_calls_are_shared_on_a_worker_that_has_data_when_another_has_none() -> None:
    runtime, data = FakeRuntime(2), FiniteData([], range(9))
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime, 1)
        futures = [data.schedule(scheduler) for _ in range(9)]
        wait_until(lambda: scheduler.queue.statistics().retried)
        gate.open()
        assert results(futures) == list(range(9))
        scheduler.join(LIMIT)
    assert (1, 4) in runtime.fused_calls
    assert {worker for worker, _ in runtime.fused_calls} == {1}


def test_a_shared_call_overtakes_no_other_closure() -> None:
    runtime, data = FakeRuntime(2), FiniteData([], range(9))
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime, 1)
        data.schedule(scheduler)
        wait_until(lambda: scheduler.queue.statistics().retried)
        closing = behind_a_gate(scheduler, runtime, 0)
        data.schedule(scheduler).add_done_callback(lambda _: order.append(1))
        scheduler.schedule(lambda _: order.append(2), "other")
        for _ in range(4):
            data.schedule(scheduler).add_done_callback(lambda _: order.append(3))
        gate.open()
        wait_until(lambda: len(order) == 6)
        closing.open()
        scheduler.join(LIMIT)
    assert order == sorted(order)
    assert runtime.fused_calls
