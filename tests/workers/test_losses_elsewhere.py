"""Tests that a closure that was lost with its worker is tried on another one, and of when it is quarantined."""

import threading
from collections import Counter

import pytest

from coordinator.errors import ClosureQuarantined
from coordinator.future import Future
from coordinator.runtime import FiniteInput
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler


class Deadly:
    """Work that kills some workers, which are restarted immediately, and returns the index of any other."""

    def __init__(self, runtime: FakeRuntime, *workers: int, returns: bool = True) -> None:
        self._runtime = runtime
        self._workers = workers
        self._returns = returns
        self.runs: Counter[int] = Counter()

    def __call__(self, worker: int) -> int:
        self.runs[worker] += 1
        if worker in self._workers:
            self._runtime.kill(worker)
            if self._returns:
                self._runtime.restart(worker)
        return worker


def wait_state(scheduler: Scheduler, worker: int, state: WorkerState) -> None:
    wait_until(lambda: scheduler.cluster.workers[worker].state is state)


def test_a_lost_closure_waits_for_another_worker_that_is_busy() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime) as scheduler:
        busy, deadly = Gate(runtime), Deadly(runtime, 0)
        scheduler.schedule(busy, "busy", worker=1)
        busy.wait_arrived()
        future = scheduler.schedule(deadly, "step")
        wait_until(lambda: scheduler.cluster.workers[0].statistics().losses == 1)
        wait_state(scheduler, 0, WorkerState.LIVE)
        # The worker that was lost goes on with all else.
        assert [scheduler.schedule(index_of, "other").result(LIMIT) for _ in range(5)] == [0] * 5
        assert not future.done()
        busy.open()
        assert future.result(LIMIT) == 1
        assert deadly.runs == {0: 1, 1: 1}


def lose_on_the_only_worker(runtime: FakeRuntime, scheduler: Scheduler) -> tuple[Deadly, Future]:
    """Has worker 0 lost with a closure as often as a closure may be, while worker 1 is away."""
    runtime.kill(1)
    wait_state(scheduler, 1, WorkerState.LOST)
    deadly = Deadly(runtime, 0)
    future = scheduler.schedule(deadly, "step")
    wait_until(lambda: deadly.runs[0] == OPTIONS.max_attempts)
    wait_state(scheduler, 0, WorkerState.LIVE)
    return deadly, future


def test_one_sick_worker_gets_no_function_quarantined_while_the_other_is_away() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime) as scheduler:
        deadly, future = lose_on_the_only_worker(runtime, scheduler)
        # From now on it waits for the other worker; all else runs.
        assert scheduler.schedule(index_of, "other").result(LIMIT) == 0
        assert not future.done()
        runtime.restart(1)
        assert future.result(LIMIT) == 1
        assert deadly.runs == {0: OPTIONS.max_attempts, 1: 1}


def test_a_closure_that_kills_two_workers_is_quarantined_and_its_error_names_them() -> None:
    runtime = FakeRuntime(3)
    with running_scheduler(runtime) as scheduler:
        deadly = Deadly(runtime, 0, 1, 2)
        future = scheduler.schedule(deadly, "step")
        with pytest.raises(ClosureQuarantined, match=r"attempt 1 on worker \d: worker lost; attempt 2 on worker \d: "):
            future.result(LIMIT)
        assert sorted(deadly.runs.values()) == [1] * OPTIONS.max_attempts
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)


def test_a_closure_that_awaits_another_worker_is_quarantined_if_it_is_removed() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime) as scheduler:
        _, future = lose_on_the_only_worker(runtime, scheduler)
        scheduler.cluster.remove_worker(1)
        assert isinstance(future.exception(LIMIT), ClosureQuarantined)
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)


def test_a_closure_that_waits_for_another_worker_runs_on_one_that_joins() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime) as scheduler:
        runtime.kill(1)
        wait_state(scheduler, 1, WorkerState.LOST)
        deadly = Deadly(runtime, 0)
        future = scheduler.schedule(deadly, "step")
        wait_until(lambda: deadly.runs[0] == OPTIONS.max_attempts)
        assert scheduler.cluster.add_worker("another:2222") == 2
        assert future.result(LIMIT) == 2


def test_a_lost_closure_runs_again_where_alone_its_data_is_left() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime) as scheduler:
        data = FiniteInput(EndOfDataError)
        data.is_finite = True
        first = threading.Event()

        def step(worker: int) -> int:
            if worker == 1:
                raise EndOfDataError(data)
            if not first.is_set():
                first.set()
                runtime.kill(worker)
                runtime.restart(worker)
            return worker

        assert scheduler.schedule(step, "step", inputs=(data,)).result(LIMIT) == 0
