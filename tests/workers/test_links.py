"""Tests of broken links between servers, in memory: what hangs is ended, and runs elsewhere or later."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, running_scheduler

QUICK = dataclasses.replace(OPTIONS, heartbeat_interval=0.002, heartbeat_timeout=0.01, max_attempts=2)
APART = "/job:ps/task:0 at a:1 does not reach /job:ps/task:1 at b:1: no answer for 5 s"


@contextlib.contextmanager
def running(workers: int, options: Options = QUICK) -> Iterator[tuple[FakeRuntime, Scheduler]]:
    runtime = FakeRuntime(workers)
    with running_scheduler(runtime, options) as scheduler:
        yield runtime, scheduler


def test_what_hangs_on_a_broken_link_runs_elsewhere_until_the_link_is_whole() -> None:
    with running(2) as (runtime, scheduler):
        gate = Gate(runtime)
        futures = [scheduler.schedule(gate, "step") for _ in range(10)]
        gate.wait_arrived(2)
        runtime.cut(0)
        gate.open()
        assert [future.result(LIMIT) for future in futures] == [1] * 10
        [lost, _] = scheduler.cluster.workers
        wait_until(lambda: lost.state is WorkerState.LOST)
        assert [scheduler.schedule(gate, "step").result(LIMIT) for _ in range(5)] == [1] * 5
        runtime.mend(0)
        wait_until(lambda: lost.state is WorkerState.LIVE)
        assert scheduler.schedule(gate, "step", worker=0).result(LIMIT) == 0
        scheduler.join(LIMIT)


def test_a_broken_link_counts_for_no_quarantine() -> None:
    with running(1) as (runtime, scheduler):
        gate = Gate(runtime)
        gate.open()
        for times in range(1, 2 + 2 * QUICK.max_attempts):
            runtime.cut(0)
            future = scheduler.schedule(gate, "step")
            wait_until(lambda times=times: scheduler.cluster.workers[0].statistics().losses == times)
            runtime.mend(0)
            assert future.result(LIMIT) == 0
        scheduler.join(LIMIT)


@pytest.mark.parametrize("fails", [False, True])
def test_functions_wait_until_the_parameter_servers_reach_each_other(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with running(2) as (runtime, scheduler):
        gate = Gate(runtime)
        gate.open()
        attempts = []

        def step(worker: int) -> int:
            attempts.append(worker)
            if fails and runtime.separation():
                raise TransientError
            return gate(worker)

        runtime.separate(APART)
        futures = [scheduler.schedule(step, "step") for _ in range(4)]
        wait_until(lambda: scheduler.cluster.links.separation == APART)
        # More often than a transient failure is retried.
        wait_until(lambda: scheduler.cluster.statistics().running == 0)
        assert not any(future.done() for future in futures)
        with scheduler.quiet(LIMIT):
            pass
        runtime.separate("")
        assert all(future.result(LIMIT) in (0, 1) for future in futures)
        scheduler.join(LIMIT)
        assert caplog.text.count(f"{APART}; functions wait until they reach each other again.") == 1
        assert caplog.text.count("The parameter servers reach each other again.") == 1


def test_a_transient_failure_on_a_broken_link_is_not_counted() -> None:
    with running(1) as (runtime, scheduler):
        failures = []

        def step(worker: int) -> int:
            if len(failures) < 2 * QUICK.transient_retries:
                failures.append(worker)
                runtime.cut(worker)
                raise TransientError
            return worker

        future = scheduler.schedule(step, "step")
        for times in range(1, 1 + 2 * QUICK.transient_retries):
            wait_until(lambda times=times: scheduler.cluster.workers[0].statistics().losses == times)
            runtime.mend(0)
        assert future.result(LIMIT) == 0
