"""Tests of `settled`: what follows from the end of a call is done when it returns, however late its thread is."""

import logging
import queue as queues
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.events.event_stream import EventStream
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import check_events, hold, index_of, run_on_threads


class Late:
    """Calls a function when the test lets it, in place of that function."""

    def __init__(self, function: Callable[..., object] = lambda *_: None) -> None:
        self._function = function
        self.begun, self._may_go_on = threading.Event(), threading.Event()
        self.is_done = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.begun.set()
        assert self._may_go_on.wait(LIMIT)
        self._function(*args, **kwargs)
        self.is_done = True

    def check_awaited(self, scheduler: Scheduler, who: str = "") -> None:
        """Checks that `settled` waits for the function, and names `who` calls it."""
        assert self.begun.wait(LIMIT)
        # What has ended a moment before may be awaited first.
        wait_until(lambda: f"settled waits for {who}" in awaited(scheduler))
        assert not self.is_done
        self._may_go_on.set()
        scheduler.settled(LIMIT)
        assert self.is_done


def awaited(scheduler: Scheduler) -> str:
    """Returns what `settled` waits for."""
    with pytest.raises(TimeoutError) as raised:
        scheduler.settled(timeout=0)
    return str(raised.value)


def call_at_the_end(scheduler: Scheduler, callback: Callable[..., object]) -> None:
    """Has worker 0 call a function: a future that has ended would call it on this thread."""
    gate, [future] = hold(scheduler, worker=0)
    future.add_done_callback(callback)
    gate.open()


def test_callbacks_of_futures_of_events_and_of_idle_workers_have_returned(scheduler: Scheduler) -> None:
    late, idle = Late(), []
    scheduler.cluster.add_idle_callback(idle.append)
    call_at_the_end(scheduler, late)
    late.check_awaited(scheduler, "worker 0")
    assert idle == [0]
    seen: list[Any] = []
    late = Late(seen.append)
    scheduler.listeners.on_event(late)
    assert scheduler.schedule(index_of, "step", worker=1).result(LIMIT) == 1
    late.check_awaited(scheduler, "the callbacks for events on coordinator-events")
    assert [event.kind for event in seen] == ["closures_started", "closures_finished"]
    late = Late()
    scheduler.cluster.add_idle_callback(late)
    scheduler.schedule(index_of, "step", worker=1).result(LIMIT)
    late.check_awaited(scheduler, "worker 1")


def test_a_cancellation_by_another_thread_is_over(scheduler: Scheduler) -> None:
    late = Late()
    gate, _ = hold(scheduler, 2)
    future = scheduler.schedule(index_of, "cancelled")
    future.add_done_callback(late)
    run_on_threads(lambda turn: (future.cancel, lambda: late.check_awaited(scheduler, "closure 2"))[turn](), range(2))
    gate.open()


# The beginnings of what follows from the loss of a server, in the words of events and of the log.
FOLLOWING = [
    *("closures_retried", "worker_lost", "worker_returned", "parameter_server_lost", "parameter_server_recovered"),
    *("task:0 was lost; its work", "task:0 reconnected", "task:0 was lost; no function runs", "servers are back"),
]


@pytest.mark.parametrize("following", FOLLOWING)
def test_losses_and_returns_are_counted_recorded_and_logged(
    following: str, scheduler: Scheduler, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Late] = []
    has_begun = threading.Event()

    def delayed(function: Callable[..., Any], text_of: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if following not in text_of(*args) or late:
                return function(*args, **kwargs)
            late.append(Late(function))
            has_begun.set()
            return late[0](*args, **kwargs)

        return call

    def restore() -> bool:
        runtime.restore_parameter_server()
        return True

    monkeypatch.setattr(EventStream, "record", delayed(EventStream.record, lambda _, kind, *__: kind))
    monkeypatch.setattr(logging.Logger, "handle", delayed(logging.Logger.handle, lambda _, line: line.getMessage()))
    scheduler.recovery.recover_with(restore)
    gate = Gate(runtime)
    future = scheduler.schedule(gate, "step", worker=0)
    gate.wait_arrived()
    if "server" in following or "no function" in following:
        runtime.lose_parameter_server()
    else:
        runtime.restart(0)
    gate.open()
    assert has_begun.wait(LIMIT)
    late[0].check_awaited(scheduler)
    assert future.result(LIMIT) == 0
    scheduler.settled(LIMIT)
    check_events(scheduler)


def test_it_does_not_wait_for_what_runs_or_waits_nor_for_a_lost_worker(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    _, futures = hold(scheduler, 3)
    scheduler.settled(LIMIT)
    runtime.kill(0)
    wait_until(lambda: scheduler.cluster.statistics().workers[0].losses)
    scheduler.settled(LIMIT)
    assert not any(future.done() for future in futures)


def test_new_closures_do_not_keep_it_waiting(scheduler: Scheduler) -> None:
    has_ended = threading.Event()

    def run(turn: int) -> None:
        if turn == 0:
            for _ in range(20):
                scheduler.settled(LIMIT)
            has_ended.set()
        while not has_ended.is_set():
            scheduler.schedule(index_of, "again").result(LIMIT)

    run_on_threads(run, range(4))
    scheduler.settled(LIMIT)
    check_events(scheduler)


def test_a_callback_that_calls_it_is_told_so(scheduler: Scheduler) -> None:
    errors: list[BaseException] = []
    has_called = threading.Semaphore(0)

    def call(*_: object) -> None:
        try:
            scheduler.settled(LIMIT)
        except RuntimeError as error:
            errors.append(error)
        has_called.release()

    stop = scheduler.listeners.on_event(call)
    call_at_the_end(scheduler, call)
    for _ in range(3):
        assert has_called.acquire(timeout=LIMIT)
    stop()
    hold(scheduler, 2)
    future = scheduler.schedule(index_of, "cancelled")
    future.add_done_callback(call)
    future.cancel()
    assert len(errors) == 4
    assert all("would wait for itself" in str(error) for error in errors)


# Idle workers


@pytest.fixture
def reported(scheduler: Scheduler) -> "queues.Queue[int]":
    reported: queues.Queue[int] = queues.Queue()
    scheduler.cluster.add_idle_callback(reported.put)
    return reported


def test_a_worker_is_reported_when_it_is_idle_or_lost_and_before_its_next_closure(
    scheduler: Scheduler, runtime: FakeRuntime, reported: "queues.Queue[int]"
) -> None:
    def fail_later(worker: int) -> None:
        gate(worker)
        raise ZeroDivisionError

    for worker in (1, 0):
        # If the other worker were reported again meanwhile, that would come first.
        scheduler.schedule(index_of, "step", worker=worker).result(LIMIT)
        assert reported.get(timeout=LIMIT) == worker
    gate = Gate(runtime)
    failed = scheduler.schedule(fail_later, "step", worker=0)
    gate.wait_arrived()
    scheduler.schedule_internal(0, lambda worker: reported.put(-1), "next")
    gate.open()
    assert isinstance(failed.exception(LIMIT), ZeroDivisionError)
    assert [reported.get(timeout=LIMIT) for _ in range(2)] == [0, -1]
    with pytest.raises(ZeroDivisionError):
        scheduler.join(LIMIT)
    scheduler.settled(LIMIT)
    _, [held] = hold(scheduler, worker=1)
    runtime.kill(1)
    assert reported.get(timeout=LIMIT) == 1
    assert not held.done()
    assert reported.empty()


def test_a_worker_that_is_removed_is_reported(scheduler: Scheduler, reported: "queues.Queue[int]") -> None:
    gate, [future] = hold(scheduler, worker=1)
    future.add_done_callback(lambda _: scheduler.cluster.workers[1].stop())
    gate.open()
    assert reported.get(timeout=LIMIT) == 1
