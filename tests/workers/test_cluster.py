"""Tests of scheduling, joining, fetching, cancelling and closing, on workers in memory."""

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError, ClosureInputError, StrategyClosedError
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler, unhealthy


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def runtime(request: pytest.FixtureRequest) -> FakeRuntime:
    return FakeRuntime(request.param)


@pytest.fixture
def scheduler(runtime: FakeRuntime) -> Iterator[Scheduler]:
    with running_scheduler(runtime) as scheduler:
        yield scheduler


def fail(worker: int) -> None:
    raise ZeroDivisionError("user's own")


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
    for epoch in range(1, 11):
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


# rows 28, 29, 31
@pytest.mark.parametrize("raiser", RAISERS)
def test_the_original_exception_is_raised_once_and_so_is_the_next_one(
    scheduler: Scheduler, runtime: FakeRuntime, raiser: str
) -> None:
    for _ in range(2):
        gate = Gate(runtime)
        futures = [
            scheduler.schedule(fail_after(gate), "fail"),
            *(scheduler.schedule(index_of, "step") for _ in range(3)),
        ]
        gate.open()
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


# Callbacks


@pytest.mark.parametrize("verb", ["join", "schedule", "done"])
@pytest.mark.parametrize("ends", ["on a worker's thread", "in close"])
def test_a_callback_that_would_wait_for_itself_is_refused(runtime: FakeRuntime, verb: str, ends: str) -> None:
    refused: list[str] = []

    def call(_: object) -> None:
        verbs = {
            "join": scheduler.join,
            "schedule": lambda: scheduler.schedule(index_of, "more"),
            "done": scheduler.done,
        }
        with pytest.raises(RuntimeError, match=f"^{verb} was called on a worker's thread, or on the one in close"):
            verbs[verb]()
        refused.append(verb)

    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        for _ in runtime.worker_addresses:
            scheduler.schedule(gate, "held")
        scheduler.schedule(gate, "step").add_done_callback(call)
        if ends == "on a worker's thread":
            gate.open()
            scheduler.join(LIMIT)
    assert refused == [verb]


# Waiting


def test_a_stalled_join_logs_what_it_waits_for_and_unavailable_workers(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(workers=2)
    runtime.kill(1)
    gate = Gate(runtime)
    options = dataclasses.replace(OPTIONS, stall_report_interval=0.01)
    with (
        caplog.at_level(logging.WARNING, logger="coordinator"),
        running_scheduler(runtime, options) as scheduler,
        ThreadPoolExecutor() as pool,
    ):
        scheduler.schedule(gate, "slow_step")
        gate.wait_arrived()
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
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    scheduler = Scheduler(runtime, runtime, dataclasses.replace(OPTIONS, close_timeout=0.01))
    futures = [scheduler.schedule(gate, "step") for _ in range(2)]
    gate.wait_arrived(2)
    runtime.freeze(1)
    assert unhealthy(scheduler) == ("/job:worker/replica:0/task:1",)
    with caplog.at_level(logging.WARNING, logger="coordinator"):
        scheduler.close()
    assert "task:1: stopped, 0 closures finished> still runs a call that cannot be cancelled" in caplog.text
    runtime.thaw(1)
    assert {type(future.exception(LIMIT)) for future in futures} == {ClosureCancelledError}
