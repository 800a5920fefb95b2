"""Many threads schedule, cancel, join, kill and restart at random; every future ends, and the counts add up."""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from coordinator.future import Future
from coordinator.testing.fake_runtime import FakeRuntime, TransientError
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, check_events, index_of, run_on_threads, running_scheduler

THREADS = 4
STEPS = 250
WORKERS = 3


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

    def run(self, seed: int) -> None:
        """Takes `STEPS` random steps."""
        chance = random.Random(seed)
        weights = {
            self.schedule: 60,
            self.cancel: 15,
            self.cancel_all: 2,
            self.join: 6,
            self.kill: 4,
            self.restart: 8,
            self.target: 5,
        }
        for step in chance.choices(list(weights), list(weights.values()), k=STEPS):
            step(chance)

    def schedule(self, chance: random.Random) -> None:
        work = chance.choices([index_of, self._fail, self._refuse_once()], [90, 5, 5])[0]
        with self._errors():
            self._remember(self._scheduler.schedule(work, "step"))
            return
        with self._lock:
            self.refused += 1

    def target(self, chance: random.Random) -> None:
        self._remember(self._scheduler.schedule_internal(chance.randrange(WORKERS), index_of, "targeted"))

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
        self._runtime.restart(chance.randrange(WORKERS))

    def settle(self) -> None:
        """Restarts every worker and joins until no error is left to be raised."""
        for worker in range(WORKERS):
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("frequent_thread_switches")
def test_after_random_faults_every_future_is_done_and_counts_add_up(seed: int) -> None:
    runtime = FakeRuntime(WORKERS)
    options = dataclasses.replace(
        OPTIONS, max_queued_closures=20, schedule_timeout=0.01, max_attempts=10**6, reconnect_interval=0.0001
    )
    with running_scheduler(runtime, options) as scheduler:
        chaos = Chaos(runtime, scheduler)
        run_on_threads(chaos.run, range(THREADS * seed, THREADS * (seed + 1)))
        chaos.settle()
        assert scheduler.done()
        statistics = scheduler.cluster.statistics()
    check_events(scheduler)
    assert all(future.done() for future in chaos.futures)
    assert sorted(map(id, chaos.called)) == sorted(map(id, chaos.futures)), "each callback was called once"
    user_errors = [error for error in chaos.raised if isinstance(error, UserError)]
    assert len(set(map(id, user_errors))) == len(user_errors), "each error was raised once"
    results = [future for future in chaos.futures if not future.cancelled() and future.exception(0) is None]
    assert statistics.finished == len(results) == sum(worker.finished for worker in statistics.workers)
    assert (statistics.waiting, statistics.running) == (0, 0)
    failed = [
        future for future in chaos.futures if not future.cancelled() and isinstance(future.exception(0), UserError)
    ]
    assert statistics.failed == len(failed)
    assert statistics.cancelled == len(chaos.futures) - len(results) - len(failed) + chaos.refused
    assert 0 < statistics.retried <= sum(worker.retried for worker in statistics.workers)
