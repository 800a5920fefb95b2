"""Closures that take too long, in memory: tried elsewhere too, and the first result counts."""

import dataclasses
import logging
import threading

import pytest

from coordinator.errors import ClosureCancelledError
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_cluster

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
    with running_cluster(runtime, options) as cluster:
        cluster.schedule_on(1, busy, "busy")
        busy.wait_arrived()
        slow = SlowOn(gate, 0)
        future = cluster.schedule(slow, "step", timeout=SHORT if said_by == "the call" else None)
        gate.wait_arrived()
        busy.open()
        assert future.result(LIMIT) == 1
        cluster.join(LIMIT)
        assert slow.started == [0, 1]
        # The straggler was cancelled, and its worker is free again.
        assert cluster.schedule_on(0, index_of, "hello").result(LIMIT) == 0
        statistics = cluster.statistics()
    assert (statistics.finished, statistics.cancelled, statistics.retried) == (3, 0, 0)
    assert sum(worker.finished for worker in statistics.workers) == 3


def test_the_straggler_may_win_and_the_second_attempt_is_dropped() -> None:
    runtime = FakeRuntime(workers=2)
    first, second = Gate(runtime), Gate(runtime)

    def work(worker: int) -> str:
        (first if not second_may_come.is_set() else second)(worker)
        return f"of worker {worker}"

    second_may_come = threading.Event()
    with running_cluster(runtime) as cluster:
        future = cluster.schedule(work, "step", timeout=SHORT)
        first.wait_arrived()
        second_may_come.set()
        second.wait_arrived()
        first.open()
        winner = future.result(LIMIT)
        second.open()
        cluster.join(LIMIT)
        wait_until(lambda: cluster.statistics().running == 0)
        assert future.result(0) == winner
        assert cluster.statistics().finished == 1


def test_a_straggler_is_tried_on_every_worker_until_one_is_quick() -> None:
    runtime = FakeRuntime(workers=3)
    gate = Gate(runtime)
    slow = SlowOn(gate, 0, 1)
    with running_cluster(runtime) as cluster:
        assert cluster.schedule(slow, "step", timeout=SHORT).result(LIMIT) == 2
        cluster.join(LIMIT)
    assert slow.started[-1] == 2


def test_join_does_not_wait_for_a_straggler_that_cannot_be_cancelled() -> None:
    runtime = FakeRuntime(workers=2)
    gate, busy = Gate(runtime), Gate(runtime)
    with running_cluster(runtime) as cluster:
        cluster.schedule_on(1, busy, "busy")
        busy.wait_arrived()
        future = cluster.schedule(SlowOn(gate, 0), "step", timeout=SHORT)
        gate.wait_arrived()
        runtime.freeze(0)
        busy.open()
        cluster.join(LIMIT)
        assert future.result(0) == 1
        runtime.thaw(0)
        assert cluster.schedule_on(0, index_of, "hello").result(LIMIT) == 0


def test_a_straggler_that_fails_after_another_won_harms_nobody() -> None:
    runtime = FakeRuntime(workers=2)
    gate, busy = Gate(runtime), Gate(runtime)

    def work(worker: int) -> int:
        if worker == 1:
            return 1
        try:
            return gate(worker)
        except ClosureCancelledError:
            raise ZeroDivisionError from None

    with running_cluster(runtime) as cluster:
        cluster.schedule_on(1, busy, "busy")
        busy.wait_arrived()
        future = cluster.schedule(work, "step", timeout=SHORT)
        gate.wait_arrived()
        busy.open()
        assert future.result(LIMIT) == 1
        cluster.schedule_on(0, index_of, "hello").result(LIMIT)
        cluster.join(LIMIT)
        assert cluster.statistics().failed == 0


def test_without_a_time_limit_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    looks: list[float] = []
    with running_cluster(runtime) as cluster:
        monkeypatch.setattr(cluster._queue, "try_overrun_elsewhere", lambda: looks.append(1))
        cluster.schedule(gate, "step")
        gate.wait_arrived()
        gate.open()
        cluster.join(LIMIT)
        assert not looks
        cluster.schedule(index_of, "step", timeout=SHORT)
        wait_until(lambda: len(looks) > 1)


# Frozen workers


def test_a_frozen_workers_closure_runs_elsewhere_once_it_is_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    slow = SlowOn(gate, 0)
    with caplog.at_level(logging.WARNING, logger="coordinator"), running_cluster(runtime) as cluster:
        busy = Gate(runtime)
        cluster.schedule_on(1, busy, "busy")
        busy.wait_arrived()
        future = cluster.schedule(slow, "step")
        gate.wait_arrived()
        runtime.freeze(0)
        busy.open()
        for _ in range(20):
            assert cluster.schedule(index_of, "others").result(LIMIT) == 1
        assert not future.done()
        runtime.hang_up(0)
        cluster.join(LIMIT)
        assert future.result(0) == 1
        runtime.thaw(0)
        assert cluster.schedule_on(0, index_of, "hello").result(LIMIT) == 0
        assert cluster.statistics().workers[0].losses == 1
    assert "task:0 was lost" in caplog.text
    assert "task:0 is there" in caplog.text
