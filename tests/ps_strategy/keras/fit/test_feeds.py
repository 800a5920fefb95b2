"""Tests of the number of steps in flight and of the reported results. No servers: the test ends each step."""

import itertools
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.future import Future
from coordinator.options import Options
from coordinator.ps_strategy.keras import feeds
from coordinator.ps_strategy.keras.feeds import ClientFeed, Feed, FiniteWorkerFeed


class Scheduler:
    """A scheduler of two workers; `join` raises the error that a test sets."""

    def __init__(self) -> None:
        self.extended = SimpleNamespace(services=SimpleNamespace(options=Options()))
        self.cluster: Any = SimpleNamespace(workers=(0, 1), statistics=lambda: "two idle workers")
        self.error: Exception | None = None

    def schedule(self, fn: Any, args: Any = None, *, worker: int | None = None) -> Future:
        return Future("step", 0, lambda: False)

    def join(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def feed(scheduler: Scheduler) -> ClientFeed:
    return ClientFeed(iter(()), scheduler)


def added(feed: Feed, count: int) -> list[Future]:
    futures = [Scheduler().schedule(None) for _ in range(count)]
    for future in futures:
        feed.add(future)
    return futures


def test_there_is_room_for_a_fixed_number_of_steps_per_worker(scheduler: Scheduler, feed: ClientFeed) -> None:
    first, *others = added(feed, 7)
    for number, (future, left) in enumerate(((first, 6), (others[1], 7))):
        # The first result is awaited.
        finishing = threading.Thread(target=future.set_result, args=[f"logs {number}"])
        finishing.start()
        feed.wait_room()
        finishing.join()
        assert (len(feed.unfinished), feed.newest_result) == (left, f"logs {number}")
        added(feed, 2)
    # While there is no worker, there is room as for one.
    scheduler.cluster.workers = ()
    feed = ClientFeed(iter(()), scheduler)
    added(feed, 4)[0].set_result("logs")
    assert feed.wait_room() == "logs"
    assert len(feed.unfinished) == 3


def test_there_is_room_for_more_steps_if_they_are_short(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, most in ((1e9, 16), (0.0, 8)):
        feed = ClientFeed(iter(()), scheduler)
        monkeypatch.setattr(feeds, "_SHORT_SECONDS", seconds)
        for future in added(feed, 17):
            future.set_result("logs")
        feed.wait_room()
        added(feed, most - 1)
        feed.wait_room()
        added(feed, 1)[0].set_result("logs of the last")
        assert feed.wait_room() == "logs of the last"
        assert len(feed.unfinished) == most - 1


def test_the_logs_of_the_last_turn_become_those_of_the_step_that_finishes_last(feed: ClientFeed) -> None:
    early, middle, last = added(feed, 3)
    early.set_result({"seen": 1.0})
    earlier_turn, of_keras = feed.wait_room(), feed.wait_room()
    for number, future in enumerate((last, middle), start=2):
        future.set_result({"seen": float(number)})
    # Keras reports what it was given in the last turn as the logs of the epoch, if they are not the model's metrics.
    feed.wait_finished()
    assert (of_keras, earlier_turn) == ({"seen": 3.0}, {"seen": 1.0})


def test_the_failure_of_the_first_step_is_raised_whichever_fails_first(scheduler: Scheduler, feed: ClientFeed) -> None:
    first, second = added(feed, 2)
    scheduler.error = ValueError("the first failure")
    second.set_cancelled()
    first.set_exception(scheduler.error)
    with pytest.raises(ValueError, match="the first failure"):
        feed.wait_finished()
    assert not feed.unfinished
    # Also if `join` does not raise it.
    scheduler.error, feed = None, ClientFeed(iter(()), scheduler)
    added(feed, 1)[0].set_exception(ValueError("of this step alone"))
    with pytest.raises(ValueError, match="of this step alone"):
        feed.wait_room()


def test_a_long_wait_logs_what_it_waits_for(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.extended.services.options = Options(stall_report_interval=0.01)
    feed = ClientFeed(iter(()), scheduler)
    [future] = added(feed, 1)
    said: list[str] = []

    def warn(text: str, *values: Any) -> None:
        said.append(text % values)
        if not future.done():
            future.set_result("late")

    monkeypatch.setattr(logging.getLogger("coordinator"), "warning", warn)
    assert feed.wait_one() == ("late", None)
    assert "1 are scheduled: two idle workers" in said[0]


class Workers(Scheduler):
    """A scheduler that runs each call at once, on the given worker or on the next one, whose data it takes.

    Args:
      batches: how many batches each worker has.
      come_later: whether the workers come with the first call that waits for one.
    """

    def __init__(self, *batches: int, come_later: bool = False) -> None:
        super().__init__()
        self._workers = [SimpleNamespace(index=index) for index in range(len(batches))]
        self.cluster.workers = [] if come_later else self._workers
        self._batches = batches
        self._next_worker = itertools.cycle(range(len(batches)))
        self.calls = 0
        self.left: list[int] = []

    def __iter__(self) -> Any:
        """As the dataset, starts from the beginning of the data."""
        self.left = list(self._batches)
        return iter(())

    def schedule(self, fn: Any, args: Any = None, *, worker: int | None = None) -> Future:
        future = super().schedule(fn)
        self.cluster.workers = self._workers
        if fn is not STEPS.of_next_if_any:
            future.set_result(None)
            return future
        self.calls += 1
        worker = next(self._next_worker) if worker is None else worker
        taken = min(self.left[worker], STEPS.steps_per_call)
        self.left[worker] -= taken
        future.set_result((taken, worker, "logs"))
        return future


STEPS: Any = SimpleNamespace(steps_per_call=2, of_next_if_any="of next, if any")


def counts_of_epochs(workers: Workers, turns: int | None, epochs: int) -> list[int]:
    """Returns how many turns of each epoch found data."""
    feed = FiniteWorkerFeed(workers, workers, turns)  # type: ignore[arg-type]  # it iterates, and schedules
    counts = []
    for _ in range(epochs):
        counts.append(0)
        while counts[-1] != turns:
            try:
                assert feed.schedule(STEPS) == "logs"
            except StopIteration:
                break
            counts[-1] += 1
        feed.wait_finished()
    return counts


def test_an_epoch_counts_the_turns_that_found_data() -> None:
    cases: list[tuple[tuple[int, ...], int | None, list[int]]] = [
        # Workers with equal and unequal data, of which an epoch takes a part, nearly all, or all.
        ((20, 20), 6, [6, 6, 6, 2]),
        ((2, 9), 5, [5, 1]),
        ((4, 8), 6, [6, 6, 6]),
        # There is not enough for one epoch: Keras ends it and makes a new feed for the next one.
        ((7, 3), 9, [6]),
        ((0, 0), 3, [0, 0]),
        # Without a number of turns, each worker's data is read once.
        ((7, 0, 2), None, [4 + 1, 0]),
    ]
    for batches, turns, expected in cases:
        workers = Workers(*batches)
        assert counts_of_epochs(workers, turns, len(expected)) == expected, batches
        # A worker is asked at most three times in vain, each time that its data is read.
        assert workers.calls <= sum(expected) + 3 * len(batches) * len(expected)
        assert turns or workers.left == [0, 0, 0]
    # The data of workers that are to come is waited for.
    for turns, expected in ((None, [5, 0]), (2, [2, 2]), (9, [5])):
        assert counts_of_epochs(Workers(7, 2, come_later=True), turns, len(expected)) == expected
