"""Random faults and changes at the same time: every future ends, and the counts add up.

Workers freeze, join and leave; parameter servers are lost and recovered; closures take results, have time limits and
are cancelled.
"""

import dataclasses
import random
import threading
from collections.abc import Callable

import pytest

from coordinator.errors import ClosureInputError
from coordinator.future import Future
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, check_events, index_of, run_on_threads, running_scheduler

THREADS = 3
STEPS = 120
WORKERS = 3


class Turmoil:
    """Random actions of users and machines, with the futures so far."""

    def __init__(self, runtime: FakeRuntime, scheduler: Scheduler) -> None:
        self.futures: list[Future] = []
        self.recoveries = 0
        self._runtime = runtime
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._membership = threading.Lock()
        self._names = 0
        scheduler.recovery.recover_with(self._recover)

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        weights: dict[Callable[[random.Random], None], int] = {
            self.schedule: 40,
            self.chain: 15,
            self.cancel: 12,
            self.cancel_all: 2,
            self.restart: 10,
            self.kill: 4,
            self.freeze: 4,
            self.lose_parameter_server: 3,
            self.change_membership: 4,
        }
        for step in chance.choices(list(weights), list(weights.values()), k=STEPS):
            step(chance)

    def schedule(self, chance: random.Random) -> None:
        self._remember(self._scheduler.schedule(index_of, "step", timeout=chance.choice([None, 0.001])))

    def chain(self, chance: random.Random) -> None:
        needed = [chance.choice(self.futures)] if self.futures else []
        self._remember(self._scheduler.schedule(lambda _: len(needed), "chained", after=needed))

    def cancel(self, chance: random.Random) -> None:
        if self.futures:
            chance.choice(self.futures).cancel()

    def cancel_all(self, chance: random.Random) -> None:
        self._scheduler.cancel_all()

    def kill(self, chance: random.Random) -> None:
        self._runtime.kill(chance.randrange(WORKERS))

    def restart(self, chance: random.Random) -> None:
        worker = chance.randrange(WORKERS)
        self._runtime.thaw(worker)
        self._runtime.restart(worker)

    def freeze(self, chance: random.Random) -> None:
        worker = chance.randrange(WORKERS)
        self._runtime.freeze(worker)
        self._runtime.hang_up(worker)

    def lose_parameter_server(self, chance: random.Random) -> None:
        self._runtime.lose_parameter_server()

    def change_membership(self, chance: random.Random) -> None:
        with self._membership:
            if len(self._scheduler.cluster.workers) > WORKERS:
                self._scheduler.cluster.remove_worker(max(worker.index for worker in self._scheduler.cluster.workers))
            else:
                self._names += 1
                self._scheduler.cluster.add_worker(f"new{self._names}:1")

    def settle(self) -> None:
        for worker in range(WORKERS):
            self._runtime.thaw(worker)
            self._runtime.restart(worker)
        self._scheduler.join(LIMIT)

    def _recover(self) -> bool:
        self._runtime.restore_parameter_server()
        self.recoveries += 1
        return True

    def _remember(self, future: Future) -> None:
        with self._lock:
            self.futures.append(future)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("frequent_thread_switches")
def test_random_faults_and_changes_lose_no_closure_and_block_nothing(seed: int) -> None:
    runtime = FakeRuntime(WORKERS)
    options = dataclasses.replace(OPTIONS, max_attempts=10**6, reconnect_interval=0.0005, heartbeat_interval=0.005)
    with running_scheduler(runtime, options) as scheduler:
        turmoil = Turmoil(runtime, scheduler)
        run_on_threads(turmoil.run, range(THREADS * seed, THREADS * (seed + 1)))
        turmoil.settle()
        assert scheduler.done()
        statistics = scheduler.cluster.statistics()
    check_events(scheduler)
    kept = [future for future in turmoil.futures if not future.cancelled()]
    results = [future for future in kept if future.exception(0) is None]
    # A closure that took the result of a cancelled one has none itself; all others must have one.
    assert {type(future.exception(0)) for future in kept} <= {type(None), ClosureInputError}
    assert statistics.finished == len(results)
    assert statistics.cancelled == len(turmoil.futures) - len(kept)
    assert (statistics.waiting, statistics.running) == (0, 0)
