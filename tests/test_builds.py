"""Tests of what is built in the background, and of how many workers prepare something at a time."""

import functools
import threading

import pytest

from coordinator.future import Future
from coordinator.runtime import Builds, Preparation
from tests.deadline import LIMIT


class Workers:
    """Notes which preparations have begun."""

    def __init__(self, builds: Builds, count: int) -> None:
        builds.workers = count
        builds.schedule = self.schedule
        self.begun: list[int] = []
        self._futures: dict[int, Future] = {}

    def schedule(self, preparation: Preparation) -> Future | None:
        self.begun.append(preparation.worker)
        future = self._futures[preparation.worker] = Future(preparation.name, preparation.worker)
        return future

    def end(self, worker: int) -> None:
        self._futures[worker].set_result(None)

    def cancel(self, worker: int) -> None:
        self._futures[worker].set_cancelled()


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_at_most_a_quarter_of_the_workers_prepare_something_but_at_least_one(workers: int, most: int) -> None:
    builds = Builds()
    cluster = Workers(builds, workers)
    for worker in range(workers):
        builds.prepare(Preparation(worker, None, "prepare"))
    assert cluster.begun == [*range(most)]
    for worker in range(workers):
        cluster.end(worker)
        assert cluster.begun == [*range(min(workers, most + worker + 1))]


def test_each_preparation_ends_once_it_is_done_cancelled_or_dropped() -> None:
    builds, ended = Builds(), []
    cluster = Workers(builds, 12)
    for worker in range(3):
        builds.prepare(Preparation(worker, None, "prepare", functools.partial(ended.append, worker)))
    cluster.end(1)
    assert ended == [1]
    cluster.cancel(0)
    assert ended == [1, 0]
    builds.schedule = lambda _: None
    builds.prepare(Preparation(3, None, "prepare", functools.partial(ended.append, 3)))
    assert ended == [1, 0, 3]


def test_requests_are_taken_in_order_until_the_end() -> None:
    builds, made = Builds(), []

    def build() -> None:
        while (request := builds.next()) is not None:
            request()

    thread = threading.Thread(target=build)
    thread.start()
    for number in range(3):
        builds.request(lambda number=number: made.append(number))
    builds.end()
    thread.join(LIMIT)
    assert made == [0, 1, 2]
