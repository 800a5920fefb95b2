"""Tests of the number of steps in flight and of the reported results. No servers: the test ends each step."""

import logging
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.future import Future
from coordinator.ps_strategy.keras.fit import feeds
from coordinator.ps_strategy.keras.fit.feeds import ClientFeed, Feed


class Scheduler:
    """A scheduler of two workers; `join` raises the error that a test sets."""

    def __init__(self) -> None:
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


def added(feed: Feed, scheduler: Scheduler, count: int) -> list[Future]:
    futures = [scheduler.schedule(None) for _ in range(count)]
    for future in futures:
        feed.add(future)
    return futures


def test_there_is_room_for_a_fixed_number_of_steps_per_worker(scheduler: Scheduler) -> None:
    feed = ClientFeed(iter(()), scheduler)
    first, *others = added(feed, scheduler, 7)
    first.set_result("logs of the first")
    assert feed.wait_room() == "logs of the first"
    assert (len(feed.unfinished), feed.newest_result) == (6, "logs of the first")
    others += added(feed, scheduler, 2)
    finishing = threading.Timer(0.05, others[1].set_result, ["logs of another"])
    finishing.start()
    feed.wait_room()
    finishing.join()
    assert (len(feed.unfinished), feed.newest_result) == (7, "logs of another")


def test_the_first_result_is_awaited(scheduler: Scheduler) -> None:
    feed = ClientFeed(iter(()), scheduler)
    [future] = added(feed, scheduler, 1)
    finishing = threading.Timer(0.05, future.set_result, ["logs"])
    finishing.start()
    feed.wait_room()
    finishing.join()
    assert feed.newest_result == "logs"


def test_the_failure_of_the_first_step_is_raised_whichever_fails_first(scheduler: Scheduler) -> None:
    feed = ClientFeed(iter(()), scheduler)
    first, second = added(feed, scheduler, 2)
    scheduler.error = ValueError("the first failure")
    second.set_cancelled()
    first.set_exception(scheduler.error)
    with pytest.raises(ValueError, match="the first failure"):
        feed.wait_finished()
    assert not feed.unfinished


def test_a_failure_that_join_does_not_raise_is_raised_anyway(scheduler: Scheduler) -> None:
    feed = ClientFeed(iter(()), scheduler)
    [future] = added(feed, scheduler, 1)
    future.set_exception(ValueError("of this step alone"))
    with pytest.raises(ValueError, match="of this step alone"):
        feed.wait_room()


def test_a_long_wait_logs_what_it_waits_for(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_STALL_REPORT_INTERVAL", 0.01)
    feed = ClientFeed(iter(()), scheduler)
    [future] = added(feed, scheduler, 1)
    reported = threading.Event()
    said: list[str] = []

    def warn(text: str, *values: Any) -> None:
        said.append(text % values)
        reported.set()

    monkeypatch.setattr(logging.getLogger("coordinator"), "warning", warn)

    def finish() -> None:
        reported.wait(30)
        future.set_result("late")

    finishing = threading.Thread(target=finish)
    finishing.start()
    assert feed.wait_one() == ("late", None)
    finishing.join()
    assert re.match(r"No step has finished for 0 s, 1 are scheduled: two idle workers", said[0])
