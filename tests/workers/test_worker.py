"""Tests of failing workers: which ones die, when, and what the caller sees."""

import dataclasses
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coordinator import background_thread
from coordinator.errors import ClosureCancelledError
from coordinator.runtime import Failure, Preparation
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, running_scheduler, unhealthy
from tests.virtual_clock import VirtualClock
from tests.workers.fusible_steps import behind_a_gate, schedule


# Which workers die together, one group after the other.
@pytest.mark.parametrize(
    ("workers", "groups"), [(1, [[0], [0]]), (3, [[0], [0]]), (3, [[0, 1, 2]]), (3, [[0], [1], [2]])]
)
def test_every_closure_completes_whichever_worker_dies(workers: int, groups: list[list[int]]) -> None:
    runtime, losses = FakeRuntime(workers), 0
    with running_scheduler(runtime) as scheduler:
        gate, futures = hold(scheduler, 5)
        for group in groups:
            for change in (runtime.kill, runtime.restart):
                for worker in group:
                    change(worker)
            losses += len(group)
            # A lost call waits at the gate again before another worker dies, or the gate opens.
            gate.wait_arrived(workers + losses)
        gate.open()
        scheduler.join(LIMIT)
        assert scheduler.done()
        assert {future.result(0) for future in futures} <= set(range(workers))
        statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.failed, statistics.cancelled) == (5, 0, 0)
    assert statistics.retried == losses
    assert sum(worker.finished for worker in statistics.workers) == 5
    for count in ("losses", "reconnections", "retried"):
        assert sum(getattr(worker, count) for worker in statistics.workers) == losses
    for worker in statistics.workers:
        assert (worker.reconnecting_seconds > 0.0) == (worker.reconnections > 0)


def test_the_loss_and_the_return_of_a_worker_are_logged(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(1)
    with running_scheduler(runtime, clock=clock) as scheduler:
        gate, [future] = hold(scheduler)
        runtime.kill(0)
        wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
        clock.advance(OPTIONS.stall_report_interval)
        text = "task:0 has been lost for 60 s; still trying. (worker0:2222 does not answer)"
        wait_until(lambda: text in caplog.text)
        runtime.restart(0)
        gate.open()
        future.result(LIMIT)
    assert "/job:worker/replica:0/task:0 was lost; no worker is left" in caplog.text
    assert caplog.text.count("still trying") == 1
    assert "/job:worker/replica:0/task:0 reconnected after 60.0 s." in caplog.text


def refused(times: int) -> Callable[[int], int]:
    """Returns work that fails this number of times before it succeeds."""
    left = [TransientError("Connection refused") for _ in range(times)]

    def work(worker: int) -> int:
        if left:
            raise left.pop()
        return worker

    return work


def test_transient_failures_are_retried_and_counted_per_closure(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="coordinator")
    futures = [scheduler.schedule(refused(OPTIONS.transient_retries), "step") for _ in range(5)]
    scheduler.join(LIMIT)
    assert scheduler.cluster.statistics().retried == 5 * OPTIONS.transient_retries
    assert all(future.result(0) in {0, 1} for future in futures)
    message = (
        r"closure 0 \(step\) failed on /job:worker/replica:0/task:\d and is run again: transient \(TransientError\)"
    )
    assert re.search(message, caplog.text)


def test_a_transient_failure_that_persists_becomes_the_error(scheduler: Scheduler) -> None:
    scheduler.schedule(refused(OPTIONS.transient_retries + 1), "step")
    with pytest.raises(TransientError, match="Connection refused") as caught:
        scheduler.join(LIMIT)
    assert "attempt 4: transient" in caught.value.__notes__[0]


@pytest.mark.parametrize(("failures", "renewals"), [(4, 0), (10, 2)])
def test_a_worker_that_answers_but_keeps_failing_is_reconnected(failures: int, renewals: int) -> None:
    with running_scheduler(FakeRuntime(workers=1), dataclasses.replace(OPTIONS, transient_retries=10)) as scheduler:
        before = scheduler.schedule(refused(1), "step")
        future = scheduler.schedule(refused(failures), "step")
        scheduler.join(LIMIT)
        assert (before.result(0), future.result(0)) == (0, 0)
        worker = scheduler.cluster.workers[0].statistics()
    assert (worker.losses, worker.reconnections) == (renewals, renewals)


def test_a_stop_does_not_wait_for_the_pause_before_a_retry() -> None:
    runtime = FakeRuntime(1)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, reconnect_interval=1000.0)) as scheduler:
        future = scheduler.schedule(refused(10), "step")
        wait_until(lambda: future.attempts)
    assert isinstance(future.exception(0), ClosureCancelledError)


# row 86
def test_a_worker_that_is_lost_while_idle_is_reconnected_without_any_work(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    assert unhealthy(scheduler) == ()
    runtime.kill(1)
    assert unhealthy(scheduler) == (scheduler.cluster.workers[1].device,)
    wait_until(lambda: scheduler.cluster.workers[1].state is WorkerState.LOST)
    assert unhealthy(scheduler) == (scheduler.cluster.workers[1].device,)
    assert [scheduler.schedule(index_of, "step").result(LIMIT) for _ in range(20)] == [0] * 20
    runtime.restart(1)
    wait_until(lambda: not unhealthy(scheduler))
    assert scheduler.cluster.statistics().workers[1].reconnections == 1


class UnexpectedErrors(FakeRuntime):
    """Raises an error, once, in a method that never raises."""

    def __init__(self, method: str) -> None:
        super().__init__(1)
        self._method: str | None = method
        self.raised = threading.Event()

    def __getattribute__(self, name: str) -> Any:
        if name != "_method" and name == self._method and threading.current_thread().name == "coordinator-worker-0":
            self._method = None
            self.raised.set()
            raise OSError(24, "Too many open files")
        return super().__getattribute__(name)


@pytest.fixture
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_thread, "_FIRST_PAUSE", 0.001)


NEVER_RAISE = ["bind_thread", "reconnect", "disconnect", "describe_loss", "most_fused", "classify"]


@pytest.mark.parametrize("method", NEVER_RAISE)
def test_a_worker_goes_on_after_an_unexpected_error_on_its_thread(method: str, brief_pauses: None) -> None:
    runtime = UnexpectedErrors(method)
    with running_scheduler(runtime) as scheduler:
        # Both wait in the queue when the worker takes the first one, and asks how many it may fuse.
        held, gate = behind_a_gate(scheduler), Gate(runtime)
        futures = schedule(scheduler, [gate] * 2)
        held.open()
        gate.wait_arrived()
        runtime.kill(0)
        runtime.restart(0)
        gate.open()
        assert [future.result(LIMIT) for future in futures] == [0, 0]
        assert runtime.raised.is_set()
        scheduler.join(LIMIT)
        [failed] = [event for event in scheduler.queue.events.since(0)[0] if event.kind == "thread_failed"]
        assert (failed.name, failed.detail) == ("coordinator-worker-0", "OSError: [Errno 24] Too many open files")
        with scheduler.quiet(LIMIT):
            assert scheduler.done()


def test_a_closure_that_always_meets_an_unexpected_error_fails_with_it(brief_pauses: None) -> None:
    class Broken(FakeRuntime):
        def classify(self, worker: int, error: BaseException) -> Failure:
            raise OSError("broken")

    with running_scheduler(Broken(2)) as scheduler:
        future = scheduler.schedule(fail, "step")
        with pytest.raises(OSError, match="broken"):
            future.result(LIMIT)
        assert future.attempts == 1 + OPTIONS.transient_retries
        with pytest.raises(OSError, match="broken"):
            scheduler.join(LIMIT)
        assert scheduler.schedule(index_of, "step").result(LIMIT) in (0, 1)


def test_a_callback_of_a_future_cannot_end_the_thread_of_its_worker(scheduler: Scheduler) -> None:
    def call(_: object) -> None:
        raise errors.pop()

    errors: list[type[BaseException]] = [KeyboardInterrupt, SystemExit, ValueError]
    gate, futures = hold(scheduler, 3, worker=0)
    for future in futures:
        future.add_done_callback(call)
    gate.open()
    assert [future.result(LIMIT) for future in futures] == [0] * 3
    scheduler.join(LIMIT)
    assert not errors
    assert scheduler.cluster.workers[0].is_alive()


def test_what_a_worker_prepares_is_neither_counted_nor_awaited(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    gate, built = Gate(runtime), threading.Event()
    runtime.builds.request(built.set)
    runtime.builds.prepare(Preparation(0, gate, "prepare"))
    gate.wait_arrived()
    scheduler.join(LIMIT)
    with scheduler.quiet(LIMIT):
        pass
    assert scheduler.cluster.statistics().running == 0
    gate.open()
    assert scheduler.schedule(index_of, "step", worker=0).result(LIMIT) == 0
    scheduler.join(LIMIT)
    statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.workers[0].finished) == (1, 1)
    assert built.wait(LIMIT)


def test_a_preparation_that_fails_or_is_lost_is_not_repeated_and_holds_up_no_other(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    gate, prepared = Gate(runtime), threading.Event()
    for work in (fail, gate):
        runtime.builds.prepare(Preparation(0, work, "prepare"))
    gate.wait_arrived()
    runtime.kill(0)
    wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
    runtime.restart(0)
    gate.open()
    runtime.builds.prepare(Preparation(0, lambda _: prepared.set(), "prepare"))
    assert prepared.wait(LIMIT)
    scheduler.join(LIMIT)
    statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.failed, statistics.retried, statistics.cancelled) == (0, 0, 0, 0)
    assert "function_quarantined" not in {event.kind for event in scheduler.queue.events.since(0)[0]}


def test_a_preparation_for_a_worker_that_is_away_holds_up_no_other(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    runtime.kill(1)
    wait_until(lambda: scheduler.cluster.workers[1].state is WorkerState.LOST)
    prepared, dropped = threading.Event(), threading.Event()
    runtime.builds.prepare(Preparation(1, index_of, "prepare", dropped.set))
    runtime.builds.prepare(Preparation(0, lambda _: prepared.set(), "prepare"))
    assert dropped.wait(LIMIT)
    assert prepared.wait(LIMIT)
