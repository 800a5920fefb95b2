"""Tests of which closures run in one call, and that each has its own future and result."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler
from tests.workers.finite_data import FiniteData
from tests.workers.fusible_steps import FOUR, SAME_KEY, behind_a_gate, recorder, results, schedule


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


def test_adjacent_closures_run_in_one_call_in_order_each_with_its_own_result(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, inner = behind_a_gate(scheduler, runtime), Gate(runtime)
        futures = schedule(scheduler, [inner, *(recorder(order, number) for number in range(1, 10))])
        gate.open()
        inner.wait_arrived()
        assert [future.running() for future in futures] == [True] * 4 + [False] * 6
        assert (scheduler.cluster.statistics().running, scheduler.cluster.statistics().waiting) == (4, 6)
        inner.open()
        assert results(futures) == [0, *order] == list(range(10))
        scheduler.join(LIMIT)
        assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]
        assert scheduler.cluster.statistics().finished == 11
        assert scheduler.cluster.statistics().workers[0].finished == 11


@pytest.mark.parametrize(("most", "sizes"), [(1, []), (3, [3, 3]), (100, [4, 2])])
def test_the_maximal_number_of_fused_steps_is_an_option(runtime: FakeRuntime, most: int, sizes: list[int]) -> None:
    options = dataclasses.replace(OPTIONS, steps_per_dispatch=most)
    with running_scheduler(runtime, options) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = schedule(scheduler, [lambda _: None] * 6)
        gate.open()
        results(futures)
    assert [size for _, size in runtime.fused_calls] == sizes


def test_a_worker_asks_for_a_larger_call_and_makes_it_once_it_is_ready(runtime: FakeRuntime) -> None:
    runtime.prepared = {}
    with running_scheduler(runtime) as scheduler:

        def run_many(**settings: Any) -> None:
            gate = behind_a_gate(scheduler, runtime)
            if settings:
                futures = [scheduler.schedule(index_of, "step", fusion_key=SAME_KEY, **settings)]
            else:
                futures = schedule(scheduler, [index_of] * 64)
            gate.open()
            results(futures)

        while not runtime.requested:
            run_many()
        assert set(runtime.requested) == {(0, 4)}
        assert not runtime.fused_calls
        runtime.prepared = {0: {4}}
        run_many()
        assert set(runtime.fused_calls) == {(0, 4)}
        # Of many runs of one closure too.
        runtime.fused_calls.clear()
        run_many(steps=64)
        assert set(runtime.fused_calls) == {(0, 4)}
        # The next size is asked for when it would pay.
        while set(runtime.requested) == {(0, 4)}:
            run_many()
        assert (0, 16) in runtime.requested


def test_no_worker_takes_more_than_its_share_of_the_waiting_closures() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as scheduler:
        gates = [behind_a_gate(scheduler, runtime, worker) for worker in (0, 1)]
        inner = Gate(runtime)
        futures = schedule(scheduler, [inner] * 10)
        gates[0].open()
        inner.wait_arrived()
        assert scheduler.cluster.statistics().waiting == 6
        gates[1].open()
        inner.open()
        assert len(results(futures)) == 10
    assert runtime.fused_calls[0] == (0, 4)


def test_closures_of_different_kinds_run_in_separate_calls_in_order(runtime: FakeRuntime) -> None:
    order: list[int] = []
    keys = [FusionKey("a", ()), FusionKey("a", ()), FusionKey("b", ()), FusionKey("b", 1), None, None]
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = [
            scheduler.schedule(recorder(order, number), "step", fusion_key=key) for number, key in enumerate(keys)
        ]
        gate.open()
        results(futures)
    assert order == list(range(6))
    assert runtime.fused_calls == [(0, 2)]


@pytest.mark.parametrize("settings", [{"worker": 0}, {"timeout": LIMIT}], ids=["for one worker", "with a time limit"])
def test_closures_with_special_options_are_not_fused(runtime: FakeRuntime, settings: dict[str, Any]) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = schedule(scheduler, [lambda _: 1] * 4, **settings)
        gate.open()
        assert results(futures) == [1] * 4
    assert runtime.fused_calls == []


@pytest.mark.parametrize("limits", [{"max_attempts": 1}, {"transient_retries": 0}])
def test_nothing_is_fused_if_a_closure_may_not_be_repeated(runtime: FakeRuntime, limits: dict[str, int]) -> None:
    with running_scheduler(runtime, dataclasses.replace(FOUR, **limits)) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = schedule(scheduler, [lambda _: 1] * 4)
        gate.open()
        results(futures)
    assert runtime.fused_calls == []


def test_a_call_keeps_nothing_of_its_closures_alive_when_it_is_over(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        steps: list[Callable[[int], object]] = [lambda _, number=number: [number] for number in range(4)]  # type: ignore[misc]
        ended = [weakref.ref(step) for step in steps]
        futures = [scheduler.schedule(step, "step", fusion_key=SAME_KEY) for step in steps]
        del steps
        gate.open()
        scheduler.join(LIMIT)
        results(futures)
        # The worker's thread may still hold its last call.
        wait_until(lambda: [step() for step in ended] == [None] * 4)


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
