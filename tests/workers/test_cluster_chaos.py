"""Random faults and changes at the same time: every future ends, and the counts add up.

Many threads schedule, cancel, join, and kill and restart workers. Then workers freeze, join and leave, too, parameter
servers are lost and recovered, and closures take results and have time limits.
"""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from coordinator.errors import ClosureInputError
from coordinator.future import Future
from coordinator.testing.fake_runtime import FakeRuntime, TransientError
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, check_events, index_of, run_on_threads, running_scheduler

THREADS, STEPS, WORKERS = 4, 200, 3
CLOSURES_AND_WORKERS = {"schedule": 60, "target": 5, "cancel": 15, "cancel_all": 2, "join": 6, "kill": 4, "restart": 8}
EVERYTHING = {
    "schedule_without_error": 40,
    "chain": 15,
    "cancel": 12,
    "cancel_all": 2,
    "kill": 4,
    "restart": 10,
    "freeze": 4,
    "lose_parameter_server": 3,
    "change_membership": 4,
}


class UserError(Exception):
    """The error that some of the work raises."""


class Chaos:
    """Random actions of users and machines, with the records that are checked afterwards."""

    def __init__(self, runtime: FakeRuntime, scheduler: Scheduler) -> None:
        self.futures: list[Future] = []
        self.called: list[Future] = []
        self.raised: list[BaseException] = []
        self.refused = 0
        self._runtime = runtime
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._membership = threading.Lock()
        self._names = 0

    def run(self, seed: int, weights: Mapping[str, int]) -> None:
        """Takes `STEPS` random steps."""
        chance = random.Random(seed)
        for step in chance.choices(list(weights), list(weights.values()), k=STEPS):
            getattr(self, step)(chance)

    def schedule(self, chance: random.Random) -> None:
        work = chance.choices([index_of, self._fail, self._refuse_once()], [90, 5, 5])[0]
        with self._errors():
            self._remember(self._scheduler.schedule(work, "step"))
            return
        with self._lock:
            self.refused += 1

    def schedule_without_error(self, chance: random.Random) -> None:
        self._remember(self._scheduler.schedule(index_of, "step", timeout=chance.choice([None, 0.001])))

    def target(self, chance: random.Random) -> None:
        self._remember(self._scheduler.schedule_internal(chance.randrange(WORKERS), index_of, "targeted"))

    def chain(self, chance: random.Random) -> None:
        needed = [chance.choice(self.futures)] if self.futures else []
        self._remember(self._scheduler.schedule(lambda _: len(needed), "chained", after=needed))

    def cancel(self, chance: random.Random) -> None:
        if self.futures:
            chance.choice(self.futures).cancel()

    def cancel_all(self, chance: random.Random) -> None:
        self._scheduler.cancel_all()

    def join(self, chance: random.Random) -> None:
        with self._errors():
            chance.choice([self._scheduler.done, lambda: self._scheduler.join(timeout=0.001)])()

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
        """Restarts every worker and joins until no error is left to be raised."""
        for worker in range(WORKERS):
            self._runtime.thaw(worker)
            self._runtime.restart(worker)
        for future in self.futures:
            future.exception(LIMIT) if not future.cancelled() else None
        with self._errors():
            self._scheduler.join(LIMIT)
        self._scheduler.join(LIMIT)

    def _remember(self, future: Future) -> None:
        with self._lock:
            self.futures.append(future)
        future.add_done_callback(self.called.append)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (UserError, TimeoutError) as error:
            with self._lock:
                self.raised.append(error)

    def _fail(self, worker: int) -> None:
        raise UserError(worker)

    def _refuse_once(self) -> Callable[[int], int]:
        refusals = [TransientError("refused")]

        def work(worker: int) -> int:
            if refusals:
                raise refusals.pop()
            return worker

        return work


@pytest.mark.parametrize("weights", [CLOSURES_AND_WORKERS, EVERYTHING], ids=["closures and workers", "everything"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("frequent_thread_switches")
def test_after_random_faults_every_future_is_done_and_counts_add_up(seed: int, weights: Mapping[str, int]) -> None:
    runtime = FakeRuntime(WORKERS)
    options = dataclasses.replace(OPTIONS, max_attempts=10**6, reconnect_interval=0.0001, heartbeat_interval=0.005)
    if weights is CLOSURES_AND_WORKERS:
        options = dataclasses.replace(options, max_queued_closures=20, schedule_timeout=0.01)
    with running_scheduler(runtime, options) as scheduler:
        if weights is EVERYTHING:
            scheduler.recovery.recover_with(lambda: runtime.restore_parameter_server() is None)
        chaos = Chaos(runtime, scheduler)
        run_on_threads(lambda number: chaos.run(THREADS * seed + number, weights), range(THREADS))
        chaos.settle()
        assert scheduler.done()
        statistics = scheduler.cluster.statistics()
    check_events(scheduler)
    assert all(future.done() for future in chaos.futures)
    assert sorted(map(id, chaos.called)) == sorted(map(id, chaos.futures)), "each callback was called once"
    user_errors = [error for error in chaos.raised if isinstance(error, UserError)]
    assert len(set(map(id, user_errors))) == len(user_errors), "each error was raised once"
    kept = [future for future in chaos.futures if not future.cancelled()]
    results = [future for future in kept if future.exception(0) is None]
    # A closure that took the result of a cancelled one has none itself.
    failed = [future for future in kept if isinstance(future.exception(0), UserError)]
    unmade = [future for future in kept if isinstance(future.exception(0), ClosureInputError)]
    assert statistics.finished == len(results)
    assert (statistics.waiting, statistics.running) == (0, 0)
    if weights is EVERYTHING:
        assert len(kept) == len(results) + len(unmade)
        assert statistics.cancelled == len(chaos.futures) - len(kept)
        return
    assert statistics.finished == sum(worker.finished for worker in statistics.workers)
    assert statistics.failed == len(failed)
    assert statistics.cancelled == len(chaos.futures) - len(results) - len(failed) + chaos.refused
    assert 0 < statistics.retried <= sum(worker.retried for worker in statistics.workers)
