"""Tests of scheduling, joining, cancelling and closing, and of threads that sleep, on workers in memory."""

import concurrent.futures
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError, ClosureInputError, StrategyClosedError
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, running_scheduler, unhealthy


def fail_after(gate: Gate) -> Callable[[int], None]:
    def work(worker: int) -> None:
        gate(worker)
        fail(worker)

    return work


# Schedule, join, fetch


# row 17
def test_join_and_done_with_nothing_scheduled_return_at_once(scheduler: Scheduler) -> None:
    scheduler.join(timeout=0)
    scheduler.join(timeout=0)
    assert scheduler.done()


# rows 17, 19
def test_after_join_everything_ran_once_and_join_may_be_repeated(scheduler: Scheduler) -> None:
    ran: list[int] = []
    for epoch in range(1, 4):
        futures = [scheduler.schedule(ran.append, "step") for _ in range(10)]
        scheduler.join(LIMIT)
        assert all(future.done() for future in futures)
        scheduler.join(timeout=0)
        assert scheduler.done()
        assert len(ran) == 10 * epoch


# rows 4, 34
def test_a_worker_closure_runs_there_and_its_error_is_only_in_its_future(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    def fail_to_make(worker: int) -> None:
        raise ClosureInputError("The dataset function raised.")

    for worker in range(len(runtime.worker_addresses)):
        assert scheduler.schedule_internal(worker, index_of, "make").result(LIMIT) == worker
        failed = scheduler.schedule_internal(worker, fail_to_make, "make")
        assert isinstance(failed.exception(LIMIT), ClosureInputError)
    scheduler.join(LIMIT)
    assert scheduler.done()
    assert scheduler.queue.steps() == 0, "the program has done none"
    scheduler.schedule(index_of, "step", steps=3)
    scheduler.join(LIMIT)
    assert scheduler.queue.steps() == 3
    scheduler.schedule(index_of, "step")
    scheduler.join(LIMIT)


# Errors


RAISERS: dict[str, Callable[[Scheduler], object]] = {
    "join": lambda scheduler: scheduler.join(LIMIT),
    "schedule": lambda scheduler: wait_until(lambda: scheduler.schedule(index_of, "more") is None),
    "done": lambda scheduler: wait_until(scheduler.done),
}


VERBS: dict[str, Callable[[Scheduler], object]] = {
    "join": lambda scheduler: scheduler.join(),
    "schedule": lambda scheduler: scheduler.schedule(index_of, "more"),
    "done": lambda scheduler: scheduler.done(),
}


# rows 28, 29, 31
@pytest.mark.parametrize("raiser", RAISERS)
def test_the_original_exception_is_raised_once_and_so_is_the_next_one(scheduler: Scheduler, raiser: str) -> None:
    for _ in range(2):
        futures = [scheduler.schedule(work, "fail") for work in (fail, index_of, index_of)]
        with pytest.raises(ZeroDivisionError, match="user's own") as caught:
            RAISERS[raiser](scheduler)
        assert futures[0].exception(0) is caught.value
        assert "(fail) failed on /job:worker/replica:0/task:" in caught.value.__notes__[0]
        scheduler.join(LIMIT)
        assert scheduler.done()
        assert all(future.done() for future in futures)
    assert scheduler.schedule(index_of, "step").result(LIMIT) in {0, 1}


# row 30
def test_of_many_failures_one_is_raised(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    futures = [scheduler.schedule(fail_after(gate), "fail") for _ in range(10)]
    gate.wait_arrived(len(runtime.worker_addresses))
    gate.open()
    with pytest.raises(ZeroDivisionError):
        scheduler.join(LIMIT)
    scheduler.join(LIMIT)
    assert {type(future.exception(0)) for future in futures} == {ZeroDivisionError, ClosureCancelledError}


# rows 35, 37
@pytest.mark.parametrize("capacity", [100, 1])
def test_an_error_cancels_what_runs_and_what_waits_also_under_back_pressure(capacity: int) -> None:
    runtime = FakeRuntime(workers=2)
    held, failing = Gate(runtime), Gate(runtime)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, max_queued_closures=capacity)) as scheduler:
        futures = [scheduler.schedule(held, "held"), scheduler.schedule(fail_after(failing), "fail")]
        held.wait_arrived()
        failing.wait_arrived()
        futures.append(scheduler.schedule(held, "waiting"))
        failing.open()
        with pytest.raises(ZeroDivisionError):
            RAISERS["schedule"](scheduler)
        for future in (futures[0], futures[2]):
            with pytest.raises(concurrent.futures.CancelledError, match="reschedule"):
                future.result(0)
        held.open()
        scheduler.schedule(held, "again")
        scheduler.join(LIMIT)


def test_a_callback_that_would_wait_for_itself_is_refused() -> None:
    def call(_: object) -> None:
        for verb, wait in VERBS.items():
            with pytest.raises(RuntimeError, match=f"^{verb} was called on a worker's thread, or on the one in close"):
                wait(scheduler)
            refused.append(verb)

    for ends in ("on a worker's thread", "in close"):
        refused: list[str] = []
        with running_scheduler(FakeRuntime(2)) as scheduler:
            gate, [*_, last] = hold(scheduler, 3)
            last.add_done_callback(call)
            if ends == "on a worker's thread":
                gate.open()
                scheduler.join(LIMIT)
        assert refused == [*VERBS], ends


def test_a_stalled_join_logs_what_it_waits_for_and_unavailable_workers(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(2)
    runtime.kill(1)
    options = dataclasses.replace(OPTIONS, stall_report_interval=0.01)
    with running_scheduler(runtime, options) as scheduler, ThreadPoolExecutor() as pool:
        gate, _ = hold(scheduler, name="slow_step", worker=0)
        # The thread of the other worker may start late.
        wait_until(lambda: scheduler.cluster.workers[1].away_seconds)
        joining = pool.submit(scheduler.join)
        wait_until(lambda: "join waits for closures" in caplog.text)
        gate.open()
        joining.result(LIMIT)
    report = next(text for text in caplog.messages if "join waits" in text)
    assert "No progress" in report
    assert "closure 0 (slow_step) on worker 0 for" in report
    assert "lost: /job:worker/replica:0/task:1" in report


# Close


# row 72
def test_close_cancels_everything_ends_the_threads_and_may_be_repeated(runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    scheduler = Scheduler(runtime, runtime, OPTIONS)
    futures = [scheduler.schedule(gate, "step") for _ in range(4)]
    gate.wait_arrived(len(runtime.worker_addresses))
    runtime.kill(0)
    scheduler.close()
    scheduler.close()
    for future in futures:
        with pytest.raises(ClosureCancelledError, match="the strategy was closed"):
            future.result(0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("coordinator-worker")]
    assert runtime.is_closed
    assert {worker.state for worker in scheduler.cluster.statistics().workers} == {"stopped"}
    scheduler.join(LIMIT)
    for late in (scheduler.schedule, lambda work, name: scheduler.schedule_internal(0, work, name)):
        with pytest.raises(StrategyClosedError, match=r"\(late\) cannot be scheduled: the strategy is closed"):
            late(index_of, "late")


def test_close_abandons_a_call_that_cannot_be_cancelled_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, close_timeout=0.01)) as scheduler:
        _, futures = hold(scheduler, 2)
        runtime.freeze(1)
        assert unhealthy(scheduler) == ("/job:worker/replica:0/task:1",)
    assert "task:1: stopped, 0 closures finished> still runs a call that cannot be cancelled" in caplog.text
    runtime.thaw(1)
    assert {type(future.exception(LIMIT)) for future in futures} == {ClosureCancelledError}


def train_on(scheduler: Scheduler) -> None:
    """Checks that new closures run and that no earlier error is raised."""
    futures = [scheduler.schedule(index_of, "after") for _ in range(10)]
    scheduler.join(LIMIT)
    assert all(future.exception(0) is None for future in futures)
    assert scheduler.done()


# Cancel all


def test_what_waits_and_what_runs_is_cancelled_and_new_work_runs(scheduler: Scheduler) -> None:
    for count in (1, 2):
        gate, futures = hold(scheduler, 12)
        futures += [
            scheduler.schedule(gate, "step", timeout=LIMIT),
            scheduler.schedule(gate, "on one worker", worker=1),
            scheduler.schedule(gate, "with a result", after=[futures[0]]),
        ]
        scheduler.cancel_all()
        assert all(future.cancelled() for future in futures)
        statistics = scheduler.cluster.statistics()
        assert (statistics.waiting, statistics.running, statistics.failed) == (0, 0, 0)
        assert (statistics.cancelled, statistics.retried) == (15 * count, 0)
        train_on(scheduler)


def refuse(worker: int) -> None:
    raise TransientError("refused")


@pytest.mark.parametrize("work", [fail, refuse])
def test_errors_and_retries_of_before_are_forgotten(scheduler: Scheduler, work: Callable[[int], None]) -> None:
    failed = scheduler.schedule(work, "step")
    wait_until(lambda: failed.done() or scheduler.cluster.statistics().retried)
    scheduler.cancel_all()
    assert failed.done()
    train_on(scheduler)


def test_a_call_that_does_not_end_is_reported_and_the_other_workers_go_on(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, close_timeout=0.01)) as scheduler:
        _, [stuck] = hold(scheduler, name="stuck", worker=1)
        runtime.freeze(1)
        scheduler.cancel_all()
        message = "The call of closure 0 (stuck) on worker 1 was cancelled, but does not end; its worker runs nothing "
        assert message in caplog.text
        train_on(scheduler)
        behind = scheduler.schedule(index_of, "behind", worker=1)
        assert not behind.running()
        runtime.thaw(1)
        assert behind.result(LIMIT) == 1
        scheduler.join(LIMIT)
        assert stuck.cancelled()


# Threads


class CountingRuntime(FakeRuntime):
    """Counts the checks of whether a worker seems to be reachable, by thread."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.checks: Counter[str] = Counter()

    def seems_reachable(self, worker: int) -> bool:
        self.checks[threading.current_thread().name] += 1
        return super().seems_reachable(worker)


def test_idle_workers_do_not_wake_up_periodically() -> None:
    runtime = CountingRuntime(8)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, heartbeat_interval=0.002)) as scheduler:
        for worker in range(8):
            scheduler.schedule(index_of, "step", worker=worker)
        scheduler.join(LIMIT)
        # Each reports after a while that it is idle, and then sleeps until it is woken.
        wait_until(lambda: len([name for name in list(runtime.checks) if name.startswith("coordinator-worker-")]) == 8)
        wait_until(lambda: len(scheduler.queue.idle_workers()) == 8)
        runtime.checks.clear()
        wait_until(lambda: runtime.checks["coordinator-idle-workers"] >= 5 * 8)
        assert set(runtime.checks) == {"coordinator-idle-workers"}
