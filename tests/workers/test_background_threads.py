"""Tests that idle workers sleep, while one thread detects the losses of all of them."""

import dataclasses
import threading
import time
from collections import Counter

import pytest

from coordinator.errors import ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate
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


def test_the_loss_of_an_idle_worker_wakes_that_worker_alone() -> None:
    runtime = CountingRuntime(4)
    with running_scheduler(runtime, QUICK) as scheduler:
        wait_until(lambda: len(scheduler.queue.idle_workers()) == 4)
        runtime.kill(2)
        wait_until(lambda: scheduler.cluster.workers[2].state is WorkerState.LOST)
        assert {name for name in runtime.checks if "-worker-" in name} == {"coordinator-worker-2"}
        runtime.restart(2)
        assert scheduler.schedule_internal(2, index_of, "hello").result(LIMIT) == 2


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


def test_the_watch_for_stragglers_sleeps_until_the_earliest_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CountingRuntime(2)
    gate = Gate(runtime)
    checked_at: list[float] = []
    with running_scheduler(runtime, QUICK) as scheduler:
        requeue_overdue = scheduler.queue.requeue_overdue

        def counted() -> float | None:
            checked_at.append(time.monotonic())
            return requeue_overdue()

        monkeypatch.setattr(scheduler.queue, "requeue_overdue", counted)
        scheduler.schedule(index_of, "short", timeout=0.001).result(LIMIT)
        futures = [scheduler.schedule(gate, "long", timeout=LIMIT * 100) for _ in range(2)]
        gate.wait_arrived(2)
        wait_until(lambda: checked_at)
        before = len(checked_at)
        runtime.checks.clear()
        wait_until(lambda: runtime.checks["coordinator-idle-workers"] >= 0 and len(runtime.checks) == 0)
        assert len(checked_at) <= before + 3, "one check for each attempt that started, and none in between"
        gate.open()
        assert sorted(future.result(LIMIT) for future in futures) == [0, 1]
