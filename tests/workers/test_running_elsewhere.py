"""Tests of closures that run on another worker: when a call is lost, takes too long, or hangs on a broken link."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest

from coordinator.errors import ClosureQuarantined
from coordinator.future import Future
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, hold, index_of, running_scheduler
from tests.virtual_clock import VirtualClock
from tests.workers.fusible_steps import FiniteData

# The limit of an attempt, in virtual seconds.
SHORT = 1000.0

LINKED = dataclasses.replace(OPTIONS, heartbeat_interval=0.002, heartbeat_timeout=0.01, max_attempts=2)

APART = "/job:ps/task:0 at a:1 does not reach /job:ps/task:1 at b:1: no answer for 5 s"


class SlowOn:
    """Work that waits at a gate on some workers, and returns the worker's index at once on the others."""

    def __init__(self, gate: Gate, *workers: int) -> None:
        self.started: list[int] = []
        self._gate = gate
        self._workers = workers

    def __call__(self, worker: int) -> int:
        self.started.append(worker)
        return self._gate(worker) if worker in self._workers else worker


@pytest.fixture
def scheduler(runtime: FakeRuntime, clock: VirtualClock) -> Iterator[Scheduler]:
    with running_scheduler(runtime, clock=clock) as scheduler:
        yield scheduler


@pytest.mark.parametrize("said_by", ["the call", "the options"])
def test_a_closure_that_overruns_is_run_elsewhere_and_the_first_result_wins(
    runtime: FakeRuntime, clock: VirtualClock, said_by: str
) -> None:
    options = OPTIONS if said_by == "the call" else dataclasses.replace(OPTIONS, closure_timeout=SHORT)
    with running_scheduler(runtime, options, clock) as scheduler:
        busy, _ = hold(scheduler, worker=1)
        gate = Gate(runtime)
        slow = SlowOn(gate, 0)
        future = scheduler.schedule(slow, "step", timeout=SHORT if said_by == "the call" else None)
        gate.wait_arrived()
        clock.advance(SHORT)
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


def test_the_straggler_may_win_and_the_second_attempt_is_dropped(
    scheduler: Scheduler, runtime: FakeRuntime, clock: VirtualClock
) -> None:
    first, second = Gate(runtime), Gate(runtime)
    left = [second, first]

    def step(worker: int) -> int:
        return left.pop()(worker)

    future = scheduler.schedule(step, "step", timeout=SHORT)
    first.wait_arrived()
    clock.advance(SHORT)
    second.wait_arrived()
    first.open()
    winner = future.result(LIMIT)
    second.open()
    scheduler.join(LIMIT)
    wait_until(lambda: scheduler.cluster.statistics().running == 0)
    assert future.result(0) == winner == future.worker
    assert scheduler.cluster.statistics().finished == 1


@pytest.mark.parametrize("attempts", [1, 2])
def test_cancel_all_ends_each_attempt_and_the_wait_for_another(
    scheduler: Scheduler, runtime: FakeRuntime, clock: VirtualClock, attempts: int
) -> None:
    if attempts == 1:
        hold(scheduler, worker=1)
    gate = Gate(runtime)
    future = scheduler.schedule(gate, "step", timeout=SHORT)
    gate.wait_arrived()
    clock.advance(SHORT)
    gate.wait_arrived(attempts)
    wait_until(lambda: scheduler.cluster.statistics().waiting == 2 - attempts)
    scheduler.cancel_all()
    assert future.cancelled()
    scheduler.schedule(index_of, "after").result(LIMIT)
    scheduler.settled(LIMIT)
    statistics = scheduler.cluster.statistics()
    assert (future.attempts, statistics.running, statistics.waiting) == (attempts, 0, 0)


def test_join_does_not_wait_for_a_straggler_that_cannot_be_cancelled(
    scheduler: Scheduler, runtime: FakeRuntime, clock: VirtualClock
) -> None:
    busy, _ = hold(scheduler, worker=1)
    gate = Gate(runtime)
    future = scheduler.schedule(SlowOn(gate, 0), "step", timeout=SHORT)
    gate.wait_arrived()
    runtime.freeze(0)
    clock.advance(SHORT)
    busy.open()
    scheduler.join(LIMIT)
    assert future.result(0) == 1
    runtime.thaw(0)
    assert scheduler.schedule_internal(0, index_of, "hello").result(LIMIT) == 0


def test_a_frozen_workers_closure_runs_elsewhere_when_its_connections_are_closed(
    scheduler: Scheduler, runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    busy, _ = hold(scheduler, worker=1)
    gate = Gate(runtime)
    future = scheduler.schedule(SlowOn(gate, 0), "step")
    gate.wait_arrived()
    runtime.freeze(0)
    busy.open()
    assert [scheduler.schedule(index_of, "others").result(LIMIT) for _ in range(20)] == [1] * 20
    assert not future.done()
    runtime.hang_up(0)
    scheduler.join(LIMIT)
    assert future.result(0) == 1
    runtime.thaw(0)
    assert scheduler.schedule_internal(0, index_of, "hello").result(LIMIT) == 0
    assert scheduler.cluster.statistics().workers[0].losses == 1
    assert "task:0 was lost" in caplog.text
    scheduler.settled(LIMIT)
    assert "task:0 reconnected" in caplog.text


# Lost calls


class Deadly:
    """Work that kills some workers, which are restarted immediately, and returns the index of any other."""

    def __init__(self, runtime: FakeRuntime, *workers: int) -> None:
        self._runtime = runtime
        self._workers = workers
        self.runs: Counter[int] = Counter()

    def __call__(self, worker: int) -> int:
        self.runs[worker] += 1
        if worker in self._workers:
            self._runtime.kill(worker)
            self._runtime.restart(worker)
        return worker


def wait_state(scheduler: Scheduler, worker: int, state: WorkerState) -> None:
    wait_until(lambda: scheduler.cluster.workers[worker].state is state)


def test_a_lost_closure_waits_for_another_worker_that_is_busy(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    busy, _ = hold(scheduler, worker=1)
    deadly = Deadly(runtime, 0)
    future = scheduler.schedule(deadly, "step")
    wait_until(lambda: scheduler.cluster.workers[0].statistics().losses == 1)
    wait_state(scheduler, 0, WorkerState.LIVE)
    # The worker that was lost goes on with all else.
    assert [scheduler.schedule(index_of, "other").result(LIMIT) for _ in range(5)] == [0] * 5
    assert not future.done()
    busy.open()
    assert future.result(LIMIT) == 1
    assert deadly.runs == {0: 1, 1: 1}


def lose_on_the_only_worker(runtime: FakeRuntime, scheduler: Scheduler) -> tuple[Deadly, Future]:
    """Has worker 0 lost with a closure as often as a closure may be, while worker 1 is away."""
    runtime.kill(1)
    wait_state(scheduler, 1, WorkerState.LOST)
    deadly = Deadly(runtime, 0)
    future = scheduler.schedule(deadly, "step")
    wait_until(lambda: deadly.runs[0] == OPTIONS.max_attempts)
    wait_state(scheduler, 0, WorkerState.LIVE)
    return deadly, future


@pytest.mark.parametrize("helper", ["returns", "joins"])
def test_one_sick_worker_gets_no_function_quarantined_while_the_other_is_away(
    scheduler: Scheduler, runtime: FakeRuntime, helper: str
) -> None:
    deadly, future = lose_on_the_only_worker(runtime, scheduler)
    # From now on it waits for the other worker; all else runs.
    assert scheduler.schedule(index_of, "other").result(LIMIT) == 0
    assert not future.done()
    runtime.restart(1) if helper == "returns" else scheduler.cluster.add_worker("another:2222")
    assert future.result(LIMIT) == (1 if helper == "returns" else 2)
    assert deadly.runs == {0: OPTIONS.max_attempts, future.worker: 1}


def test_a_closure_that_kills_two_workers_is_quarantined_and_its_error_names_them() -> None:
    runtime = FakeRuntime(3)
    with running_scheduler(runtime) as scheduler:
        deadly = Deadly(runtime, 0, 1, 2)
        future = scheduler.schedule(deadly, "step")
        with pytest.raises(ClosureQuarantined, match=r"attempt 1 on worker \d: worker lost; attempt 2 on worker \d: "):
            future.result(LIMIT)
        assert sorted(deadly.runs.values()) == [1] * OPTIONS.max_attempts
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)


def test_a_closure_that_awaits_another_worker_is_quarantined_if_it_is_removed(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    _, future = lose_on_the_only_worker(runtime, scheduler)
    scheduler.cluster.remove_worker(1)
    assert isinstance(future.exception(LIMIT), ClosureQuarantined)
    with pytest.raises(ClosureQuarantined):
        scheduler.join(LIMIT)


def test_a_lost_closure_runs_again_where_alone_its_data_is_left(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    data, deadly = FiniteData([1], []), Deadly(runtime, 0)

    def step(worker: int) -> int:
        return deadly(worker) if worker == 0 and not deadly.runs else data(worker)

    assert scheduler.schedule(step, "step", inputs=(data.input,)).result(LIMIT) == 1


# Broken links


@contextlib.contextmanager
def running(workers: int) -> Iterator[tuple[FakeRuntime, Scheduler]]:
    runtime = FakeRuntime(workers)
    with running_scheduler(runtime, LINKED) as scheduler:
        yield runtime, scheduler


def test_a_worker_is_asked_about_its_links_ever_less_often_while_a_call_lasts(
    runtime: FakeRuntime, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    looks: list[None] = []
    monkeypatch.setattr(runtime, "broken_links", lambda workers: asked.append(clock.now()) or {})
    options = dataclasses.replace(LINKED, heartbeat_timeout=10.0)
    with running_scheduler(runtime, options, clock) as scheduler:
        attempts = scheduler.queue.attempts
        monkeypatch.setattr(scheduler.queue, "attempts", lambda *worker: looks.append(None) or attempts(*worker))
        hold(scheduler)
        for seconds in (1.0, 1.0, 9.0, 1.0, 11.0, 1.0):
            clock.advance(seconds)
            looks.clear()
            # The second look from now on sees this time, and has ended when the third one begins.
            wait_until(lambda: len(looks) > 2)
    assert asked == [2.0, 12.0, 24.0]


def test_what_hangs_on_a_broken_link_runs_elsewhere_until_the_link_is_whole() -> None:
    with running(2) as (runtime, scheduler):
        gate, futures = hold(scheduler, 10)
        runtime.cut(0)
        gate.open()
        assert [future.result(LIMIT) for future in futures] == [1] * 10
        wait_state(scheduler, 0, WorkerState.LOST)
        assert [scheduler.schedule(gate, "step").result(LIMIT) for _ in range(5)] == [1] * 5
        runtime.mend(0)
        wait_state(scheduler, 0, WorkerState.LIVE)
        assert scheduler.schedule(gate, "step", worker=0).result(LIMIT) == 0
        scheduler.join(LIMIT)


@pytest.mark.parametrize("fails", [False, True], ids=["hangs", "fails"])
def test_neither_losses_nor_failures_on_a_broken_link_are_counted(fails: bool) -> None:
    times = 2 * max(LINKED.max_attempts, LINKED.transient_retries)
    with running(1) as (runtime, scheduler):
        left = [*range(times)]

        def step(worker: int) -> int:
            if left:
                left.pop()
                runtime.cut(worker)
                if fails:
                    raise TransientError
                runtime.wait_at_gate(worker, lambda: False)
            return worker

        future = scheduler.schedule(step, "step")
        for count in range(1, 1 + times):
            wait_until(lambda count=count: scheduler.cluster.workers[0].statistics().losses == count)
            runtime.mend(0)
        assert future.result(LIMIT) == 0
        scheduler.join(LIMIT)


@pytest.mark.parametrize("fails", [False, True], ids=["hangs", "fails"])
def test_functions_wait_until_the_parameter_servers_reach_each_other(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with running(2) as (runtime, scheduler):

        def step(worker: int) -> int:
            if fails and runtime.separation():
                raise TransientError
            runtime.wait_at_gate(worker, lambda: True)
            return worker

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
        assert not any(worker.losses for worker in scheduler.cluster.statistics().workers)
