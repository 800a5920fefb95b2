"""Tests of many runs of one closure: in order, by need, and of which only those that were lost are made again."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coordinator.errors import ClosureCancelledError
from coordinator.queueing.closure import RunsClosure, RunsFuture
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FailureKind, FusionKey
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import check_events, hold, index_of, running_scheduler
from tests.queueing.closure_queue_bench import Stalls, fail, new_queue, put_new, take
from tests.virtual_clock import VirtualClock
from tests.workers.fusible_steps import FOUR, SAME_KEY, FiniteData, shards
from tests.workers.test_quiet import quiet_on_a_thread


class UserError(Exception):
    """The error of a run, or of another closure."""


class Counted:
    """Work that returns how often it was called before, and does something at one of the calls."""

    def __init__(self, at: int = -1, action: Callable[[int], Any] | None = None) -> None:
        self.calls = 0
        self._at = at
        self._action = action
        self._lock = threading.Lock()

    def __call__(self, worker: int) -> int:
        with self._lock:
            number = self.calls
            self.calls += 1
        if number == self._at and self._action is not None:
            self._action(worker)
        return number


def schedule(scheduler: Scheduler, work: Callable[[int], Any], steps: int, **settings: Any) -> RunsFuture:
    future = scheduler.schedule(work, "step", steps=steps, **settings)
    assert isinstance(future, RunsFuture)
    return future


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


@pytest.mark.parametrize("key", [None, SAME_KEY], ids=["alone", "fused"])
def test_results_are_in_the_order_of_the_runs_and_all_runs_are_counted(
    runtime: FakeRuntime, key: FusionKey | None
) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, Counted(), 100, fusion_key=key)
        assert future.result(LIMIT) == list(range(100))
        scheduler.join(LIMIT)
        assert (future.completed, future.done(), future.running()) == (100, True, False)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.workers[0].finished, statistics.retried) == (100, 100, 0)
        check_events(scheduler)
    assert {size for _, size in runtime.fused_calls} <= ({4, 2} if key else set())


@pytest.mark.parametrize("is_discarded", [False, True])
def test_a_future_counts_the_runs_that_have_ended(runtime: FakeRuntime, is_discarded: bool) -> None:
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, Counted(5, gate), 40)
        gate.wait_arrived()
        assert (future.completed, future.done(), future.running()) == (5, False, True)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.waiting + statistics.running) == (5, 35)
        called: list[object] = []
        future.add_done_callback(called.append)
        if is_discarded:
            future.discard()
        gate.open()
        scheduler.join(LIMIT)
        assert (future.completed, called) == (40, [future])
        assert future.result(LIMIT) == (None if is_discarded else [*range(40)])


@pytest.mark.parametrize("fails", [False, True], ids=["lost", "failed"])
def test_only_the_runs_of_a_call_that_is_lost_or_fails_are_made_again(runtime: FakeRuntime, fails: bool) -> None:
    def end_call(worker: int) -> None:
        if fails:
            raise UserError
        runtime.kill(worker)
        runtime.restart(worker)

    work = Counted(21, end_call)
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, work, 100, fusion_key=SAME_KEY)
        result = future.result(LIMIT)
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.workers[0].losses) == (100, int(not fails))
        assert 1 <= statistics.retried <= 4
        # A call that fails does so with its second run, and makes no more.
        assert work.calls == 100 + statistics.retried - 2 * fails
        # The results of that call are missing, and no others.
        assert len(result) == len(set(result)) == 100
        check_events(scheduler)


@pytest.mark.parametrize("stop_on_error", [True, False])
def test_the_error_of_one_run_is_that_of_the_future_and_ends_the_others(stop_on_error: bool) -> None:
    runtime = FakeRuntime(2)

    def fail(worker: int) -> None:
        raise UserError

    options = dataclasses.replace(FOUR, stop_on_error=stop_on_error)
    with running_scheduler(runtime, options) as scheduler:
        work = Counted(30, fail)
        future = schedule(scheduler, work, 1000)
        assert isinstance(future.exception(LIMIT), UserError)
        if stop_on_error:
            with pytest.raises(UserError):
                scheduler.join(LIMIT)
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.failed, statistics.finished + statistics.cancelled) == (1, 999)
        check_events(scheduler)


def test_cancelled_runs_end_and_the_strategy_goes_on() -> None:
    with running_scheduler(FakeRuntime(2)) as scheduler:
        _, [future] = hold(scheduler, steps=100)
        assert future.cancel()
        assert future.cancelled()
        assert not schedule(scheduler, index_of, 1, worker=1).cancelled()
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.cancelled) == (1, 100)
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(LIMIT)
        check_events(scheduler)


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_slow_worker_makes_few_runs_and_none_that_exceeds_its_timeout(timeout: float | None) -> None:
    runtime, clock = FakeRuntime(2), VirtualClock()
    gate = Gate(runtime)

    def slow_on_0(worker: int) -> int:
        return worker or gate(worker)

    with running_scheduler(runtime, clock=clock) as scheduler:
        future = schedule(scheduler, slow_on_0, 100, timeout=timeout)
        gate.wait_arrived()
        # The slow worker has the run that it makes, and no other.
        wait_until(lambda: future.completed >= 99)
        assert not future.done()
        gate.open() if timeout is None else clock.advance(timeout)
        assert sum(future.result(LIMIT)) == (99 if timeout is None else 100)
        scheduler.join(LIMIT)
    assert runtime.fused_calls == []


def test_a_quiet_period_and_what_the_library_schedules_come_between_two_runs(runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, gate, 1000)
        gate.wait_arrived()
        with quiet_on_a_thread(scheduler) as is_quiet:
            internal = scheduler.schedule_internal(0, lambda _: future.completed, "internal")
            gate.open()
            assert is_quiet.wait(LIMIT)
            assert internal.result(LIMIT) == future.completed == 1
            assert scheduler.cluster.statistics().running == 0
        assert len(future.result(LIMIT)) == 1000


def test_more_runs_than_there_are_data_end_with_its_error() -> None:
    runtime, data = FakeRuntime(2), FiniteData(*shards(50, 2))
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, data, 60, inputs=(data.input,), fusion_key=SAME_KEY)
        assert isinstance(future.exception(LIMIT), EndOfDataError)
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
        assert future.completed == 50
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.failed + statistics.cancelled) == (50, 10)
        assert set(data.taken.values()) == {1}
        check_events(scheduler)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_wrong_number_of_steps_is_refused(runtime: FakeRuntime, steps: Any) -> None:
    with running_scheduler(runtime) as scheduler, pytest.raises((ValueError, TypeError), match="steps"):
        scheduler.schedule(index_of, "step", steps=steps)


def put_runs(queue: ClosureQueue, steps: int) -> RunsFuture:
    """Puts many runs in the queue of two workers."""
    for worker in (0, 1):
        queue.admit(worker)
    runs = RunsFuture("step", 0, steps, lambda results: results)
    closure = RunsClosure(None, "step", 0, runs)
    closure.prepare(SAME_KEY)
    queue.put(closure, LIMIT)
    return runs


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
