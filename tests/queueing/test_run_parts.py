"""Tests of how many runs of one closure are divided into the calls of workers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError
from coordinator.queueing.closure import RunsClosure, RunsFuture
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FailureKind
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.fusion_size import FusionSizeModel
from tests.deadline import LIMIT
from tests.fake_cluster import check_events, index_of, running_scheduler
from tests.queueing.closure_queue_bench import Stalls, fail, new_queue, put_new, take
from tests.workers.fusible_steps import FOUR, SAME_KEY, behind_a_gate


class UserError(Exception):
    """The error of another closure."""


def put_runs(queue: ClosureQueue, steps: int) -> RunsFuture:
    """Puts many runs in the queue of two workers."""
    for worker in (0, 1):
        queue.admit(worker)
    runs, closure = new_runs(steps)
    queue.put(closure, LIMIT)
    return runs


def new_runs(steps: int) -> tuple[RunsFuture, RunsClosure]:
    runs = RunsFuture("step", 0, steps, lambda results: results)
    closure = RunsClosure(None, "step", 0, runs)
    closure.prepare(SAME_KEY)
    return runs, closure


def test_a_worker_makes_calls_of_the_largest_size_until_the_last() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, FOUR) as scheduler:
        assert len(scheduler.schedule(index_of, "step", steps=1000, fusion_key=SAME_KEY).result(LIMIT)) == 1000
    sizes = [size for _, size in runtime.fused_calls]
    # Those of the last runs are smaller, so that both workers have some.
    assert sizes.count(4) >= 245


def test_a_worker_takes_the_last_runs_alone_if_that_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(2)
    monkeypatch.setattr(FusionSizeModel, "steps", lambda model, function, available, may_build: available)
    monkeypatch.setattr(FusionSizeModel, "beyond_share", lambda model, function: 5)
    with running_scheduler(runtime) as scheduler:
        held = [behind_a_gate(scheduler, runtime, worker) for worker in (0, 1)]
        future = scheduler.schedule(index_of, "step", steps=10, fusion_key=SAME_KEY)
        held[1].open()
        assert future.result(LIMIT) == [1] * 10
        held[0].open()
        scheduler.join(LIMIT)
        assert scheduler.cluster.statistics().waiting == 0
        check_events(scheduler)
    assert runtime.fused_calls == [(1, 10)]


def test_there_is_more_room_when_a_worker_takes_more_than_its_share() -> None:
    stalls = Stalls()
    queue = new_queue(stalls, capacity=1)
    runs = put_runs(queue, 10)
    attempt = take(queue)
    assert (attempt.closure.runs, queue.statistics().waiting) == (5, 5)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(queue.wait_for_room, LIMIT, lambda: False)
        stalls.wait_for("schedule waits for room")
        assert queue.available_runs(attempt) == 10
        assert queue.begin_runs(attempt, lambda available: available) == 10
        waiting.result(LIMIT)
    assert (attempt.closure.runs, queue.statistics().waiting, list(runs.parts)) == (10, 0, [attempt.closure])
    assert queue.take(1, timeout=0) is None
    queue.finish([attempt], [["all"]])
    queue.wait_settled(timeout=0)


def test_runs_that_have_not_begun_when_another_closure_fails_are_cancelled() -> None:
    queue = new_queue(Stalls())
    first = put_new(queue, 1)
    runs = put_runs(queue, 10)
    other, attempt = take(queue), take(queue, 1)
    assert other.closure is first
    fail(queue, other, UserError())
    assert queue.begin_runs(attempt, lambda available: 2) == 1
    assert isinstance(runs.exception(LIMIT), ClosureCancelledError)
    queue.finish([attempt], ["not used"])
    with pytest.raises(UserError):
        queue.wait_settled(LIMIT)
    statistics = queue.statistics()
    assert (statistics.cancelled, statistics.failed, statistics.waiting) == (10, 1, 0)


def test_runs_of_a_lost_call_keep_their_numbers_when_they_are_divided() -> None:
    queue = new_queue(Stalls())
    runs = put_runs(queue, 4)
    lost = take(queue)
    assert queue.begin_runs(lost, lambda available: available) == 4
    lost.closure.record_failure(0, FailureKind.WORKER_LOST)
    queue.requeue(lost)
    first = take(queue, 1)
    assert queue.begin_runs(first, lambda _: 1) == 1
    second = take(queue, 1)
    assert queue.begin_runs(second, lambda _: 2) == 2
    queue.set_away(1, is_away=True)
    last = take(queue)
    assert queue.begin_runs(last, lambda available: available) == 1
    for attempt, result in ((last, "3"), (second, "1 2"), (first, "0")):
        assert (attempt.number, attempt.closure.fusion_key) == (2, None)
        assert attempt.closure.failures == ((0, FailureKind.WORKER_LOST),)
        queue.finish([attempt], [result])
    queue.wait_settled(LIMIT)
    assert runs.result(LIMIT) == ["0", "1 2", "3"]
