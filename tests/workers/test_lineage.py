"""Tests of closures that take the results of others, and of closures for one worker, in memory."""

import dataclasses
from collections.abc import Callable

import pytest

from coordinator.errors import ClosureInputError, WorkerLost
from coordinator.future import Future
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, running_scheduler
from tests.virtual_clock import VirtualClock

ISOLATED = dataclasses.replace(OPTIONS, stop_on_error=False)


def sum_of(*futures: Future) -> Callable[[int], int]:
    return lambda worker: 1 + sum(future.result(timeout=0) for future in futures)


def test_a_closure_runs_after_those_whose_results_it_takes() -> None:
    with running_scheduler(FakeRuntime(3)) as scheduler:
        gate, [first] = hold(scheduler, worker=0)
        second = scheduler.schedule(sum_of(first, first), "second", after=[first, first])
        third = scheduler.schedule(sum_of(first, second), "third", after=[first, second])
        statistics = scheduler.cluster.statistics()
        assert (statistics.running, statistics.waiting) == (1, 2)
        with pytest.raises(TimeoutError):
            scheduler.join(timeout=0)
        gate.open()
        scheduler.join(LIMIT)
        assert (first.result(0), second.result(0), third.result(0)) == (0, 1, 2)
        late = scheduler.schedule(sum_of(third), "late", after=[third])
        assert late.result(LIMIT) == 3


def test_a_result_that_is_an_argument_survives_its_worker() -> None:
    runtime = FakeRuntime(1)
    with running_scheduler(runtime) as scheduler:
        gate, [first] = hold(scheduler)
        second = scheduler.schedule(sum_of(first), "second", after=[first])
        assert (first.worker, first.attempts, first.may_have_run_twice) == (0, 1, False)
        assert (second.worker, second.attempts) == (None, 0)
        runtime.kill(0)
        runtime.restart(0)
        gate.wait_arrived(2)
        gate.open()
        assert second.result(LIMIT) == 1
        assert (first.worker, first.attempts, first.may_have_run_twice) == (0, 2, True)
        assert (second.worker, second.attempts, second.may_have_run_twice) == (0, 1, False)
        runtime.kill(0)
        third = scheduler.schedule(sum_of(second), "third", after=[second])
        runtime.restart(0)
        assert third.result(LIMIT) == 2


def test_a_closure_that_takes_the_result_of_a_failed_one_fails_with_the_reason() -> None:
    with running_scheduler(FakeRuntime(workers=2), ISOLATED) as scheduler:
        first = scheduler.schedule(fail, "first")
        second = scheduler.schedule(sum_of(first), "second", after=[first])
        third = scheduler.schedule(sum_of(second), "third", after=[second])
        other = scheduler.schedule(index_of, "other")
        scheduler.join(LIMIT)
        with pytest.raises(ClosureInputError, match=r"closure 1 \(second\) was not run.*closure 0 \(first\)") as caught:
            second.result(0)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(ClosureInputError, match=r"closure 2 \(third\) was not run.*closure 1 \(second\)"):
            third.result(0)
        assert other.result(0) in {0, 1}
        late = scheduler.schedule(sum_of(first), "late", after=[first])
        assert isinstance(late.exception(LIMIT), ClosureInputError)
        scheduler.join(LIMIT)


# Input affinity


def test_a_closure_for_one_worker_runs_there_alone_and_join_waits_for_it() -> None:
    with running_scheduler(FakeRuntime(3)) as scheduler:
        gate, futures = hold(scheduler, 5, worker=2)
        assert scheduler.cluster.statistics().waiting == 4
        with pytest.raises(TimeoutError):
            scheduler.join(timeout=0)
        gate.open()
        scheduler.join(LIMIT)
        assert [future.result(0) for future in futures] == [2] * 5
        with pytest.raises(ValueError, match=r"no worker 3; there are \[0, 1, 2\]"):
            scheduler.schedule(index_of, "step", worker=3)


def test_a_closure_for_a_lost_worker_waits_for_its_return(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    runtime.kill(1)
    waiting = scheduler.schedule(index_of, "step", worker=1)
    assert scheduler.schedule(index_of, "other").result(LIMIT) == 0
    runtime.restart(1)
    assert waiting.result(LIMIT) == 1


def test_a_closure_for_an_unavailable_worker_times_out_and_others_continue(
    runtime: FakeRuntime, clock: VirtualClock
) -> None:
    with running_scheduler(runtime, clock=clock) as scheduler:
        runtime.kill(1)
        wait_until(lambda: scheduler.cluster.workers[1].state is WorkerState.LOST)
        doomed = scheduler.schedule(index_of, "doomed", worker=1)
        clock.advance(OPTIONS.affinity_timeout - 1.0)
        later = scheduler.schedule(index_of, "later", worker=1)
        clock.advance(1.0)
        message = r"closure 0 \(doomed\) may run on .*task:1 alone, .* lost for 300 s.*Options.affinity_timeout"
        with pytest.raises(WorkerLost, match=message):
            doomed.result(LIMIT)
        runtime.restart(1)
        assert later.result(LIMIT) == 1
        assert scheduler.schedule(index_of, "other").result(LIMIT) == 0
        with pytest.raises(WorkerLost, match="doomed"):
            scheduler.join(LIMIT)
        scheduler.join(LIMIT)


# Errors that only their future raises


def test_an_error_may_concern_its_own_future_alone() -> None:
    with running_scheduler(FakeRuntime(2), ISOLATED) as scheduler:
        gate, [held] = hold(scheduler)
        failed = scheduler.schedule(fail, "fail")
        waiting = [scheduler.schedule(index_of, "step") for _ in range(5)]
        assert isinstance(failed.exception(LIMIT), ZeroDivisionError)
        gate.open()
        scheduler.join(LIMIT)
        assert scheduler.done()
        assert {future.result(0) for future in [held, *waiting]} <= {0, 1}
        assert scheduler.cluster.statistics().failed == 1


def test_a_closure_that_takes_the_result_of_a_cancelled_one_fails_alone() -> None:
    with running_scheduler(FakeRuntime(1)) as scheduler:
        gate, _ = hold(scheduler, name="busy")
        first = scheduler.schedule(index_of, "first")
        second = scheduler.schedule(sum_of(first), "second", after=[first])
        assert first.cancel()
        assert isinstance(second.exception(LIMIT), ClosureInputError)
        gate.open()
        scheduler.join(LIMIT)
