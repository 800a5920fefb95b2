"""Tests of threads of the library, which outlive what their work raises, and of what they build."""

import functools
import logging
import os
import threading
import traceback
from collections.abc import Callable

import pytest

from coordinator import background_thread
from coordinator.background_thread import BackgroundThread, only_here, refuse_forked
from coordinator.future import Future
from coordinator.runtime import Builds, Preparation
from tests.deadline import LIMIT


@pytest.fixture
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_thread, "_FIRST_PAUSE", 0.001)


class Work:
    """Raises each of some errors, one in each call, and then waits until its thread is stopped."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self._errors = [*errors]
        self.reported: list[type[BaseException]] = []
        self.arrived = threading.Event()
        self.is_finished = threading.Event()
        self.thread = BackgroundThread("coordinator-test", self, self.report, self.is_finished.set)

    def __call__(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.arrived.set()
        self.thread.stopping.wait()

    def report(self, error: BaseException) -> None:
        self.reported.append(type(error))


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_work_goes_on_after_any_error(
    error: type[BaseException], brief_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work(error, error)
    work.thread.start()
    assert work.arrived.wait(LIMIT)
    assert work.reported == [error, error]
    assert not work.is_finished.is_set()
    assert work.thread.is_alive()
    work.thread.stop()
    assert work.thread.wait_stopped(LIMIT)
    assert work.is_finished.is_set()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(messages) == 2
    assert messages[0].startswith(f"The thread coordinator-test met an unexpected {error.__name__} and goes on after ")


def test_a_thread_that_is_stopped_while_it_pauses_ends_and_releases_what_it_used() -> None:
    work = Work(ValueError, ValueError)
    work.thread.start()
    work.thread.stop()
    assert work.thread.wait_stopped(LIMIT)
    assert work.is_finished.is_set()
    assert not work.arrived.is_set()


def in_child(check: Callable[[], object]) -> None:
    """Calls a function in a process that is forked from this one; fails if it raises."""
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException:  # noqa: BLE001 - the parent fails
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_call_is_made_in_the_process_that_it_is_meant_for_alone() -> None:
    called: list[int] = []
    call = only_here(lambda: called.append(1))

    def check() -> None:
        call()
        assert not called

    in_child(check)
    call()
    assert called == [1]


def test_a_forked_process_is_told_whose_object_it_uses() -> None:
    owner = os.getpid()
    refuse_forked(owner, "The strategy")

    def check() -> None:
        with pytest.raises(RuntimeError, match=rf"^The strategy belongs to process {owner}, from which this process"):
            refuse_forked(owner, "The strategy")

    in_child(check)


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
