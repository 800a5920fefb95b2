"""Tests of the removal of a worker while something else happens to it."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import WorkerLost
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.cluster import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, running_scheduler
from tests.workers.finite_data import FiniteData


class SlowReconnection(FakeRuntime):
    """Reconnects a worker only once a test allows it."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def reconnect(self, worker: int) -> bool:
        self.has_begun.set()
        return self.may_end.wait(LIMIT) and super().reconnect(worker)


def test_a_worker_that_is_removed_while_it_is_reconnected_is_not_waited_for() -> None:
    runtime, data = SlowReconnection(2), FiniteData([], [1])
    with running_scheduler(runtime) as scheduler, ThreadPoolExecutor() as pool:
        runtime.kill(1)
        assert runtime.has_begun.wait(LIMIT)
        runtime.restart(1)
        worker = scheduler.cluster.workers[1]
        removing = pool.submit(scheduler.cluster.remove_worker, 1)
        wait_until(lambda: worker.state is WorkerState.STOPPED)
        runtime.may_end.set()
        removing.result(LIMIT)
        assert isinstance(data.schedule(scheduler).exception(LIMIT), EndOfDataError)


def test_a_closure_that_a_removed_worker_gives_back_late_fails_and_is_not_waited_for() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, close_timeout=0.01)) as scheduler:
        future = scheduler.schedule(gate, "step", worker=1)
        gate.wait_arrived()
        runtime.freeze(1)
        # The call cannot be cancelled, so that the worker is removed before it has ended.
        scheduler.cluster.remove_worker(1, timeout=0)
        assert not future.done()
        runtime.thaw(1)
        assert isinstance(future.exception(LIMIT), WorkerLost)
        with pytest.raises(WorkerLost, match="may run only on worker 1, which was removed"):
            scheduler.join(LIMIT)
