"""Tests of closures that take too long, in memory: they also run elsewhere, and the first result counts."""

import dataclasses
import logging

import pytest

from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_scheduler

SHORT = 0.02


class SlowOn:
    """Work that waits at a gate on some workers, and returns the worker's index at once on the others."""

    def __init__(self, gate: Gate, *workers: int) -> None:
        self.started: list[int] = []
        self._gate = gate
        self._workers = workers

    def __call__(self, worker: int) -> int:
        self.started.append(worker)
        return self._gate(worker) if worker in self._workers else worker


@pytest.mark.parametrize("said_by", ["the call", "the options"])
def test_a_closure_that_overruns_is_run_elsewhere_and_the_first_result_wins(said_by: str) -> None:
    runtime = FakeRuntime(workers=2)
    gate, busy = Gate(runtime), Gate(runtime)
    options = OPTIONS if said_by == "the call" else dataclasses.replace(OPTIONS, closure_timeout=SHORT)
    with running_scheduler(runtime, options) as scheduler:
        scheduler.schedule_internal(1, busy, "busy")
        busy.wait_arrived()
        slow = SlowOn(gate, 0)
        future = scheduler.schedule(slow, "step", timeout=SHORT if said_by == "the call" else None)
        gate.wait_arrived()
        busy.open()
        assert future.result(LIMIT) == 1
        assert (future.worker, future.attempts, future.may_have_run_twice) == (1, 2, True)
        scheduler.join(LIMIT)
        assert slow.started == [0, 1]
        # The straggler was cancelled, and its worker is free again.
        assert scheduler.schedule_internal(0, index_of, "hello").result(LIMIT) == 0
        statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.cancelled, statistics.retried) == (3, 0, 0)
    assert sum(worker.finished for worker in statistics.workers) == 3


def test_the_straggler_may_win_and_the_second_attempt_is_dropped() -> None:
    runtime = FakeRuntime(workers=2)
    first, second = Gate(runtime), Gate(runtime)
    gates = iter([first, second])

    def work(worker: int) -> str:
        next(gates)(worker)
        return f"of worker {worker}"

    with running_scheduler(runtime) as scheduler:
        future = scheduler.schedule(work, "step", timeout=SHORT)
        first.wait_arrived()
        second.wait_arrived()
        first.open()
        winner = future.result(LIMIT)
        second.open()
        scheduler.join(LIMIT)
        wait_until(lambda: scheduler.cluster.statistics().running == 0)
        assert future.result(0) == winner == f"of worker {future.worker}"
        assert scheduler.cluster.statistics().finished == 1


def test_join_does_not_wait_for_a_straggler_that_cannot_be_cancelled() -> None:
    runtime = FakeRuntime(workers=2)
    gate, busy = Gate(runtime), Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        scheduler.schedule_internal(1, busy, "busy")
        busy.wait_arrived()
        future = scheduler.schedule(SlowOn(gate, 0), "step", timeout=SHORT)
        gate.wait_arrived()
        runtime.freeze(0)
        busy.open()
        scheduler.join(LIMIT)
        assert future.result(0) == 1
        runtime.thaw(0)
        assert scheduler.schedule_internal(0, index_of, "hello").result(LIMIT) == 0


def test_without_a_time_limit_no_closure_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    checks: list[float] = []
    monkeypatch.setattr(ClosureQueue, "requeue_overdue", lambda queue: checks.append(1))
    with running_scheduler(runtime) as scheduler:
        # The thread checks once when it starts.
        wait_until(lambda: checks)
        checks.clear()
        scheduler.schedule(gate, "step")
        gate.wait_arrived()
        gate.open()
        scheduler.join(LIMIT)
        assert not checks
        scheduler.schedule(index_of, "step", timeout=SHORT)
        wait_until(lambda: checks)


# Frozen workers


def test_a_frozen_workers_closure_runs_elsewhere_when_its_connections_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    slow = SlowOn(gate, 0)
    with caplog.at_level(logging.WARNING, logger="coordinator"), running_scheduler(runtime) as scheduler:
        busy = Gate(runtime)
        scheduler.schedule_internal(1, busy, "busy")
        busy.wait_arrived()
        future = scheduler.schedule(slow, "step")
        gate.wait_arrived()
        runtime.freeze(0)
        busy.open()
        for _ in range(20):
            assert scheduler.schedule(index_of, "others").result(LIMIT) == 1
        assert not future.done()
        runtime.hang_up(0)
        scheduler.join(LIMIT)
        assert future.result(0) == 1
        runtime.thaw(0)
        assert scheduler.schedule_internal(0, index_of, "hello").result(LIMIT) == 0
        assert scheduler.cluster.statistics().workers[0].losses == 1
    assert "task:0 was lost" in caplog.text
    assert "task:0 reconnected" in caplog.text
