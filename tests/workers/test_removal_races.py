"""Tests of the removal of a worker while something else happens to it."""

import threading
from concurrent.futures import ThreadPoolExecutor

from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime
from coordinator.workers.worker import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import running_scheduler
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
