"""Idle workers sleep: one thread listens for losses on behalf of all of them."""

import dataclasses
import threading
from collections import Counter

from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.worker import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_cluster

HASTY = dataclasses.replace(OPTIONS, heartbeat_interval=0.002)


class ListeningRuntime(FakeRuntime):
    """Counts which thread asked whether a worker seems to be there."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.asked: Counter[str] = Counter()

    def seems_reachable(self, worker: int) -> bool:
        self.asked[threading.current_thread().name] += 1
        return super().seems_reachable(worker)


def test_idle_workers_are_not_woken_by_the_passage_of_time() -> None:
    runtime = ListeningRuntime(8)
    with running_cluster(runtime, HASTY) as cluster:
        for worker in range(8):
            cluster.schedule(index_of, "step", worker=worker)
        cluster.join(LIMIT)
        # Each tells after a while that it rests, and then sleeps for good.
        wait_until(lambda: len([name for name in runtime.asked if name.startswith("coordinator-worker-")]) == 8)
        wait_until(lambda: len(cluster._queue.idle_workers()) == 8)
        runtime.asked.clear()
        wait_until(lambda: runtime.asked["coordinator-idle-workers"] >= 5 * 8)
        assert set(runtime.asked) == {"coordinator-idle-workers"}


def test_the_loss_of_an_idle_worker_wakes_that_worker_alone() -> None:
    runtime = ListeningRuntime(4)
    with running_cluster(runtime, HASTY) as cluster:
        wait_until(lambda: len(cluster._queue.idle_workers()) == 4)
        runtime.kill(2)
        wait_until(lambda: cluster.workers[2].state is WorkerState.LOST)
        assert {name for name in runtime.asked if "-worker-" in name} == {"coordinator-worker-2"}
        runtime.restart(2)
        assert cluster.schedule_on(2, index_of, "hello").result(LIMIT) == 2


def test_a_worker_that_is_lost_while_nothing_may_be_run_is_noticed_too() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, HASTY) as cluster:
        cluster._queue.hold("a parameter server is lost")
        waiting = cluster.schedule(index_of, "step")
        wait_until(lambda: len(cluster._queue.idle_workers()) == 2)
        runtime.kill(0)
        wait_until(lambda: cluster.workers[0].state is WorkerState.LOST)
        cluster._queue.release()
        assert waiting.result(LIMIT) == 1
