"""Tests of the callbacks for workers that have become idle."""

import gc
import logging
import queue
from collections.abc import Iterator

import pytest

from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost, WorkerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate, LinkLost, TransientError
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import index_of, running_scheduler


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(2)


@pytest.fixture
def scheduler(runtime: FakeRuntime) -> Iterator[Scheduler]:
    with running_scheduler(runtime) as scheduler:
        yield scheduler


@pytest.fixture
def reported(scheduler: Scheduler) -> "queue.Queue[int]":
    reported: queue.Queue[int] = queue.Queue()
    scheduler.cluster.add_idle_callback(reported.put)
    return reported


def test_an_idle_worker_is_reported_once(scheduler: Scheduler, reported: "queue.Queue[int]") -> None:
    scheduler.schedule(index_of, "step", worker=1).result(LIMIT)
    assert reported.get(timeout=LIMIT) == 1
    scheduler.schedule(index_of, "step", worker=0).result(LIMIT)
    # If worker 1 had been reported again meanwhile, that would come first.
    assert reported.get(timeout=LIMIT) == 0
    assert reported.empty()


def test_a_worker_whose_closure_failed_is_reported_before_it_takes_another(
    scheduler: Scheduler, runtime: FakeRuntime, reported: "queue.Queue[int]"
) -> None:
    gate = Gate(runtime)

    def fail_later(worker: int) -> None:
        gate(worker)
        raise ZeroDivisionError

    failed = scheduler.schedule(fail_later, "step", worker=0)
    gate.wait_arrived()
    scheduler.schedule_internal(0, lambda worker: reported.put(-1), "next")
    gate.open()
    assert isinstance(failed.exception(LIMIT), ZeroDivisionError)
    assert [reported.get(timeout=LIMIT) for _ in range(2)] == [0, -1]
    with pytest.raises(ZeroDivisionError):
        scheduler.join(LIMIT)


def test_a_worker_lost_while_running_is_reported_while_it_is_unavailable(
    scheduler: Scheduler, runtime: FakeRuntime, reported: "queue.Queue[int]"
) -> None:
    gate = Gate(runtime)
    future = scheduler.schedule(gate, "step", worker=0)
    gate.wait_arrived()
    runtime.kill(0)
    assert reported.get(timeout=LIMIT) == 0
    assert not future.done()
    runtime.restart(0)
    gate.open()
    assert future.result(LIMIT) == 0


def test_a_removed_worker_is_reported(scheduler: Scheduler, runtime: FakeRuntime, reported: "queue.Queue[int]") -> None:
    gate = Gate(runtime)
    future = scheduler.schedule(gate, "step", worker=1)
    gate.wait_arrived()
    future.add_done_callback(lambda _: scheduler.cluster.workers[1].stop())
    gate.open()
    assert reported.get(timeout=LIMIT) == 1


class Listener:
    def __init__(self, reported: "queue.Queue[int]") -> None:
        self._reported = reported

    def report(self, worker: int) -> None:
        self._reported.put(-worker)


def test_a_method_is_called_for_as_long_as_its_object_lives(scheduler: Scheduler, reported: "queue.Queue[int]") -> None:
    listener = Listener(reported)
    scheduler.cluster.add_idle_callback(listener.report)
    scheduler.schedule(index_of, "step", worker=1).result(LIMIT)
    assert [reported.get(timeout=LIMIT) for _ in range(2)] == [1, -1]
    del listener
    gc.collect()
    scheduler.schedule(index_of, "step", worker=1).result(LIMIT)
    assert reported.get(timeout=LIMIT) == 1
    scheduler.schedule(index_of, "step", worker=0).result(LIMIT)
    # The listener reported nothing in between.
    assert reported.get(timeout=LIMIT) == 0


def test_an_error_in_a_callback_is_logged_and_has_no_other_effect(
    scheduler: Scheduler, reported: "queue.Queue[int]", caplog: pytest.LogCaptureFixture
) -> None:
    """Without a traceback, and not as an error, if a server or the network is the cause."""
    errors = [
        *(ZeroDivisionError("of the user"), ClosureInputError("of the input"), WorkerLost("worker 1", "lost")),
        *(ParameterServerLost("ps 0", "lost"), TransientError(), LinkLost(), ClosureCancelledError()),
    ]

    def fail(_: int) -> None:
        raise errors.pop(0)

    scheduler.cluster.add_idle_callback(fail)
    with caplog.at_level(logging.INFO, "coordinator"):
        while errors:
            assert scheduler.schedule(index_of, "step", worker=0).result(LIMIT) == 0
            scheduler.settled(LIMIT)
            assert reported.get_nowait() == 0
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged == ["of the user", "of the input"]
    assert len(caplog.records) == 2
