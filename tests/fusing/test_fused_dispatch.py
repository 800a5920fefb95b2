"""Which closures run in one call, and that each keeps its own future and result."""

import dataclasses
import threading
from typing import Any

import pytest

from coordinator.future import Future
from coordinator.queueing.closure import Closure
from coordinator.runtime import Likeness
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, running_cluster
from tests.fusing.fusible_steps import FOUR, Step, behind_a_gate, recorder, results, schedule


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


def test_closures_that_wait_in_a_row_run_in_one_call_in_order_and_each_has_its_own_result(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [recorder(order, number) for number in range(10)])
        gate.open()
        assert results(futures) == order == list(range(10))
        cluster.join(LIMIT)
        assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]
        assert cluster.statistics().finished == 11
        assert cluster.statistics().workers[0].finished == 11


def test_a_closure_does_not_wait_for_others_like_it(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        assert results(schedule(cluster, [lambda _: 1])) == [1]
    assert runtime.fused_calls == []


def test_all_closures_of_a_call_are_running(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate, inner = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [inner] * 5)
        gate.open()
        inner.wait_arrived()
        assert [future.running() for future in futures] == [True] * 4 + [False]
        assert (cluster.statistics().running, cluster.statistics().waiting) == (4, 1)
        inner.open()
        cluster.join(LIMIT)


@pytest.mark.parametrize(("most", "sizes"), [(1, []), (2, [2, 2, 2]), (3, [3, 3]), (100, [4, 2])])
def test_the_most_steps_of_a_call_can_be_chosen(runtime: FakeRuntime, most: int, sizes: list[int]) -> None:
    options = dataclasses.replace(OPTIONS, steps_per_dispatch=most)
    with running_cluster(runtime, options) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: None] * 6)
        gate.open()
        results(futures)
    assert [size for _, size in runtime.fused_calls] == sizes


def test_short_steps_are_fused_without_being_told_so(runtime: FakeRuntime) -> None:
    with running_cluster(runtime) as cluster:
        while not runtime.fused_calls:
            gate = behind_a_gate(cluster, runtime)
            futures = schedule(cluster, [lambda _: None] * 64)
            gate.open()
            results(futures)


def test_no_worker_takes_more_than_its_share_of_what_waits() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as cluster:
        gates = [behind_a_gate(cluster, runtime, worker) for worker in (0, 1)]
        inner = Gate(runtime)
        futures = schedule(cluster, [inner] * 10)
        gates[0].open()
        inner.wait_arrived()
        assert cluster.statistics().waiting == 6
        gates[1].open()
        inner.open()
        assert len(results(futures)) == 10
    assert runtime.fused_calls[0] == (0, 4)


def test_a_lost_worker_has_no_share() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as cluster:
        runtime.kill(1)
        wait_until(lambda: cluster.statistics().workers[1].state == "lost")
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: None] * 8)
        gate.open()
        results(futures)
    assert runtime.fused_calls == [(0, 8)]


def test_closures_that_are_not_alike_run_in_calls_of_their_own_and_in_order(runtime: FakeRuntime) -> None:
    order: list[int] = []
    likenesses = [Likeness("a", ()), Likeness("a", ()), Likeness("b", ()), Likeness("b", 1), None, None]
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = [
            cluster.schedule(Step(recorder(order, number), likeness), "step")
            for number, likeness in enumerate(likenesses)
        ]
        gate.open()
        results(futures)
    assert order == list(range(6))
    assert runtime.fused_calls == [(0, 2)]


@pytest.mark.parametrize("settings", [{"worker": 0}, {"timeout": LIMIT}], ids=["for one worker", "with a time limit"])
def test_closures_that_ask_for_more_than_to_be_run_are_not_fused(
    runtime: FakeRuntime, settings: dict[str, Any]
) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4, **settings)
        gate.open()
        assert results(futures) == [1] * 4
    assert runtime.fused_calls == []


@pytest.mark.parametrize("limits", [{"max_attempts": 1}, {"transient_retries": 0}])
def test_nothing_is_fused_where_a_neighbours_failure_would_be_the_end_of_a_closure(
    runtime: FakeRuntime, limits: dict[str, int]
) -> None:
    with running_cluster(runtime, dataclasses.replace(FOUR, **limits)) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4)
        gate.open()
        results(futures)
    assert runtime.fused_calls == []


def test_a_full_queue_has_room_for_as_many_as_were_taken(runtime: FakeRuntime) -> None:
    options = dataclasses.replace(FOUR, max_queued_closures=4)
    with running_cluster(runtime, options) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4)
        more: list[Future] = []
        blocked = [threading.Thread(target=lambda: more.extend(schedule(cluster, [lambda _: 2]))) for _ in range(4)]
        for thread in blocked:
            thread.start()
        gate.open()
        for thread in blocked:
            thread.join(LIMIT)
        assert results(futures) == [1] * 4
        assert results(more) == [2] * 4


def test_a_call_keeps_nothing_of_its_closures_alive_when_it_is_over(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: object() for _ in range(4)])
        closures = [closure for closure in cluster._queue._state.lines if isinstance(closure, Closure)]
        gate.open()
        cluster.join(LIMIT)
        results(futures)
        assert [closure.work for closure in closures] == [None] * 4
