"""Tests of cancelling everything that is scheduled, on workers in memory."""

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable

import pytest

from coordinator.errors import ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(workers=2)


def train_on(scheduler: Scheduler) -> None:
    """Checks that new closures run and that no earlier error is raised."""
    futures = [scheduler.schedule(index_of, "after") for _ in range(10)]
    scheduler.join(LIMIT)
    assert all(future.exception(0) is None for future in futures)
    assert scheduler.done()


def test_what_waits_and_what_runs_is_cancelled_and_new_work_runs(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime) as scheduler:
        for count in (1, 2):
            gate = Gate(runtime)
            first = scheduler.schedule(gate, "step")
            futures = [
                first,
                scheduler.schedule(gate, "step", timeout=LIMIT),
                *(scheduler.schedule(gate, "step") for _ in range(10)),
                scheduler.schedule(gate, "on one worker", worker=1),
                scheduler.schedule(gate, "with a result", after=[first]),
            ]
            gate.wait_arrived(2)
            scheduler.cancel_all()
            assert all(future.cancelled() for future in futures)
            statistics = scheduler.cluster.statistics()
            assert (statistics.waiting, statistics.running, statistics.failed) == (0, 0, 0)
            assert (statistics.cancelled, statistics.retried) == (14 * count, 0)
            train_on(scheduler)


def fail(worker: int) -> None:
    raise ZeroDivisionError("of the user")


def refuse(worker: int) -> None:
    raise TransientError("refused")


@pytest.mark.parametrize("work", [fail, refuse])
def test_errors_and_retries_of_before_are_forgotten(runtime: FakeRuntime, work: Callable[[int], None]) -> None:
    with running_scheduler(runtime) as scheduler:
        failed = [scheduler.schedule(work, "step")]
        if work is fail:
            concurrent.futures.wait(failed, LIMIT)
        else:
            wait_until(lambda: scheduler.cluster.statistics().retried)
        scheduler.cancel_all()
        assert failed[0].done()
        train_on(scheduler)


def test_closures_of_lost_workers_do_not_come_back(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime) as scheduler:
        gate = Gate(runtime)
        futures = [scheduler.schedule(gate, "step") for _ in range(4)]
        gate.wait_arrived(2)
        for worker in range(2):
            runtime.kill(worker)
        wait_until(lambda: {worker.state for worker in scheduler.cluster.workers} == {WorkerState.LOST})
        scheduler.cancel_all()
        assert all(future.cancelled() for future in futures)
        for worker in range(2):
            runtime.restart(worker)
        train_on(scheduler)
        with pytest.raises(TimeoutError):
            gate.wait_arrived(3, timeout=0)


def test_while_parameter_servers_are_recovered_new_work_waits_for_the_recovery(runtime: FakeRuntime) -> None:
    is_back = threading.Event()

    def recover() -> bool:
        if is_back.is_set():
            runtime.restore_parameter_server()
        return is_back.is_set()

    with running_scheduler(runtime) as scheduler:
        scheduler.recovery.recover_with(recover)
        gate = Gate(runtime)
        futures = [scheduler.schedule(gate, "step") for _ in range(4)]
        gate.wait_arrived(2)
        runtime.lose_parameter_server()
        lost = runtime.lost_parameter_server()
        assert isinstance(lost, ParameterServerLost)
        scheduler.recovery.begin(lost)
        scheduler.cancel_all()
        assert all(future.cancelled() for future in futures)
        later = scheduler.schedule(index_of, "after")
        assert not scheduler.done()
        is_back.set()
        assert later.result(LIMIT) in {0, 1}
        train_on(scheduler)


def test_a_call_that_does_not_end_is_reported_and_the_other_workers_go_on(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    never, began = threading.Event(), threading.Event()

    def wait_in_python(worker: int) -> str:
        began.set()
        assert never.wait(LIMIT)
        return "too late"

    options = dataclasses.replace(OPTIONS, close_timeout=0.01)
    with caplog.at_level(logging.WARNING, logger="coordinator"), running_scheduler(runtime, options) as scheduler:
        try:
            stuck = scheduler.schedule(wait_in_python, "stuck", worker=1)
            assert began.wait(LIMIT)
            scheduler.cancel_all()
            assert caplog.messages == [
                "The call of closure 0 (stuck) on worker 1 was cancelled, but does not end; its worker runs "
                "nothing else meanwhile."
            ]
            train_on(scheduler)
            behind = scheduler.schedule(index_of, "behind", worker=1)
            assert not behind.running()
        finally:
            never.set()
        assert behind.result(LIMIT) == 1
        scheduler.join(LIMIT)
        assert stuck.cancelled()
