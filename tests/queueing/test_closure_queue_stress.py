"""Many threads on one queue, at random: no wake-up is lost, and no closure is run twice or never; and its weight.

Closures for any worker and for certain ones, workers that wait with and without a limit, that are interrupted, removed
and admitted again, and a queue that is held and released meanwhile.
"""

import gc
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.options import Options
from coordinator.queueing.closure import Closure, ClosureState
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.testing.fake_runtime import FakeRuntime
from tests.deadline import LIMIT
from tests.fake_cluster import hold, index_of, running_scheduler
from tests.queueing.closure_queue_bench import Stalls, new_queue, put_new

WORKERS = 12
USERS = 3
CLOSURES_OF_EACH = 80


class Stress:
    """Threads that act as workers, users and disturbances on one queue."""

    def __init__(self, queue: ClosureQueue) -> None:
        self.finished: Counter[int] = Counter()
        self._queue = queue
        self._counting = threading.Lock()
        self._are_users_done = threading.Event()

    def work(self, worker: int) -> None:
        chance = random.Random(worker)
        pause = threading.Event()
        while not self._queue.is_stopped:
            attempt = self._queue.take(worker, chance.choice([None, None, 0.0, 0.0002]))
            if attempt is None:
                pause.wait(0.0002)
            elif attempt.number < 3 and chance.random() < 0.2:
                self._queue.requeue(attempt)
            else:
                self._queue.finish([attempt], [worker])
                with self._counting:
                    self.finished[attempt.closure.number] += attempt.closure.state is ClosureState.DONE

    def use(self, user: int) -> list[Closure]:
        chance = random.Random(100 + user)
        numbers = range(user * CLOSURES_OF_EACH, (user + 1) * CLOSURES_OF_EACH)
        return [
            put_new(self._queue, number, target=chance.choice([None, chance.randrange(WORKERS)])) for number in numbers
        ]

    def disturb(self, seed: int) -> None:
        chance = random.Random(1000 + seed)
        disturbances: list[Callable[[], object]] = [
            lambda: self._queue.pause("of a test"),
            self._queue.resume,
            self._queue.resume,
            lambda: self._queue.interrupt(chance.randrange(WORKERS)),
            lambda: self._queue.dismiss(chance.randrange(WORKERS)),
            lambda: self._queue.admit(chance.randrange(WORKERS)),
            lambda: [self._queue.interrupt(worker) for worker in self._queue.idle_workers()],
        ]
        while not self._are_users_done.wait(0.0001):
            chance.choice(disturbances)()

    def settle(self) -> None:
        """Ends the disturbances, after which everything must be run."""
        self._are_users_done.set()
        for worker in range(WORKERS):
            self._queue.admit(worker)
        self._queue.resume()


@pytest.mark.parametrize("repeat", [0, 1, *(pytest.param(repeat, marks=pytest.mark.long) for repeat in range(2, 10))])
@pytest.mark.usefixtures("frequent_thread_switches")
def test_every_closure_is_run_once_and_no_wake_up_is_lost(repeat: int) -> None:
    queue = new_queue(Stalls(), capacity=10)
    stress = Stress(queue)
    with ThreadPoolExecutor(WORKERS + USERS + 1) as pool:
        working = [pool.submit(stress.work, worker) for worker in range(WORKERS)]
        disturbing = pool.submit(stress.disturb, repeat)
        using = [pool.submit(stress.use, user) for user in range(USERS)]
        try:
            closures = [closure for user in using for closure in user.result(LIMIT)]
            stress.settle()
            disturbing.result(LIMIT)
            stress.settle()
            queue.wait_settled(LIMIT)
        finally:
            stress.settle()
            queue.stop()
        for worker in working:
            worker.result(LIMIT)
    assert stress.finished == dict.fromkeys(range(USERS * CLOSURES_OF_EACH), 1)
    assert all(closure.future.result(0) in range(WORKERS) for closure in closures)
    assert queue.idle_workers() == []


def test_a_waiting_closure_takes_less_than_500_bytes_with_its_future() -> None:
    with running_scheduler(FakeRuntime(1), Options()) as scheduler:
        gate, _ = hold(scheduler)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(2000):
                scheduler.schedule(index_of, "step")
            weight, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert weight / 2000 < 500
        gate.open()
        scheduler.join(LIMIT)
