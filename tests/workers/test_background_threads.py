"""Tests that idle workers sleep, while one thread detects the losses of all of them."""

import dataclasses
import threading
from collections import Counter

from coordinator.errors import ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.cluster import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler

QUICK = dataclasses.replace(OPTIONS, heartbeat_interval=0.002)


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
    with running_scheduler(runtime, QUICK) as scheduler:
        for worker in range(8):
            scheduler.schedule(index_of, "step", worker=worker)
        scheduler.join(LIMIT)
        # Each reports after a while that it is idle, and then sleeps until it is woken.
        wait_until(lambda: len([name for name in list(runtime.checks) if name.startswith("coordinator-worker-")]) == 8)
        wait_until(lambda: len(scheduler.queue.idle_workers()) == 8)
        runtime.checks.clear()
        wait_until(lambda: runtime.checks["coordinator-idle-workers"] >= 5 * 8)
        assert set(runtime.checks) == {"coordinator-idle-workers"}


def test_a_worker_that_is_lost_while_nothing_may_be_run_is_noticed_too() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, QUICK) as scheduler:
        is_restored = threading.Event()
        scheduler.recovery.recover_with(is_restored.is_set)
        scheduler.recovery.begin(ParameterServerLost("/job:ps/task:0", "a test says so"))
        wait_until(lambda: scheduler.queue.is_paused)
        waiting = scheduler.schedule(index_of, "step")
        wait_until(lambda: len(scheduler.queue.idle_workers()) == 2)
        runtime.kill(0)
        wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
        is_restored.set()
        assert waiting.result(LIMIT) == 1
