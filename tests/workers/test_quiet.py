"""Tests of periods in which no scheduled closure runs, on workers in memory."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import pytest

from coordinator.errors import StrategyClosedError
from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, run_on_threads, running_scheduler


@contextlib.contextmanager
def quiet_on_a_thread(scheduler: Scheduler) -> Iterator[threading.Event]:
    """Begins a quiet period on another thread and ends it with the block; the event is set once it is quiet."""
    is_quiet, is_over = threading.Event(), threading.Event()

    def be_quiet() -> None:
        with contextlib.suppress(StrategyClosedError), scheduler.quiet():
            is_quiet.set()
            assert is_over.wait(LIMIT)

    thread = threading.Thread(target=be_quiet)
    thread.start()
    try:
        wait_until(lambda: is_quiet.is_set() or "strategy.quiet() was entered" in description(scheduler))
        yield is_quiet
    finally:
        is_over.set()
        thread.join(LIMIT)
        assert not thread.is_alive()


def description(scheduler: Scheduler) -> str:
    """Returns what a wait for the queue reports, which says why nothing is started."""
    try:
        scheduler.join(0)
    except (TimeoutError, RuntimeError) as error:
        return str(error)
    return ""


def test_nothing_runs_inside_and_what_was_scheduled_runs_afterwards(scheduler: Scheduler) -> None:
    scheduler.schedule(index_of, "before").result(LIMIT)
    with scheduler.quiet(LIMIT):
        futures = [scheduler.schedule(index_of, "inside") for _ in range(20)]
        futures += [scheduler.schedule(index_of, "inside", worker=worker) for worker in (0, 1)]
        # What the library schedules runs inside, and behind it what else would have run.
        for worker in (0, 1):
            assert scheduler.schedule_internal(worker, index_of, "read a copy").result(LIMIT) == worker
        assert scheduler.cluster.statistics().waiting == 22
    assert futures[-1].result(LIMIT) == 1
    scheduler.join(LIMIT)


def test_it_begins_when_what_runs_has_ended(scheduler: Scheduler) -> None:
    gates, [*first] = zip(*(hold(scheduler, worker=worker) for worker in (0, 1)), strict=True)
    waiting = scheduler.schedule(index_of, "later")
    with quiet_on_a_thread(scheduler) as is_quiet:
        gates[0].open()
        first[0][0].result(LIMIT)
        assert not is_quiet.is_set()
        gates[1].open()
        assert is_quiet.wait(LIMIT)
        assert first[1][0].done()
        assert not waiting.done()
    waiting.result(LIMIT)


def test_a_function_that_waits_for_a_later_one_keeps_it_from_beginning_and_is_named(scheduler: Scheduler) -> None:
    gate, _ = hold(scheduler, name="waiting step")
    with pytest.raises(TimeoutError, match=r"quiet\(\) waits .*waiting step"), scheduler.quiet(0.01):
        pytest.fail("a function runs")
    # After the timeout everything goes on.
    scheduler.schedule(index_of, "next").result(LIMIT)
    with quiet_on_a_thread(scheduler) as is_quiet:
        opening = scheduler.schedule(lambda _: gate.open(), "opening step")
        assert not is_quiet.is_set()
        assert not opening.done()
        gate.open()
        assert is_quiet.wait(LIMIT)
    scheduler.join(LIMIT)


@pytest.mark.parametrize("fate", ["kill", "freeze"])
def test_a_lost_worker_is_not_waited_for_and_its_closure_runs_afterwards(
    scheduler: Scheduler, runtime: FakeRuntime, fate: str
) -> None:
    gate, [future] = hold(scheduler, worker=0)
    with quiet_on_a_thread(scheduler) as is_quiet:
        getattr(runtime, fate)(0)
        if fate == "freeze":
            assert not is_quiet.is_set()
            runtime.hang_up(0)
        assert is_quiet.wait(LIMIT)
        runtime.restart(0) if fate == "kill" else runtime.thaw(0)
        gate.open()
        wait_until(scheduler.cluster.workers[0].healthy)
        assert not future.done()
    assert future.result(LIMIT) == 0


def test_nested_and_concurrent_periods_end_with_the_last_one(scheduler: Scheduler) -> None:
    with scheduler.quiet(LIMIT), quiet_on_a_thread(scheduler) as is_quiet:
        with scheduler.quiet(LIMIT):
            future = scheduler.schedule(index_of, "step")
        assert is_quiet.wait(LIMIT)
        assert not future.done()
    future.result(LIMIT)


def test_many_threads_enter_and_leave_while_closures_run(scheduler: Scheduler) -> None:
    running: list[int] = []

    def step(worker: int) -> None:
        running.append(worker)
        running.remove(worker)

    def enter_or_schedule(number: int) -> None:
        for _ in range(50):
            if number % 2:
                scheduler.schedule(step, "step", fusion_key=FusionKey("step", "") if number == 1 else None)
                continue
            with scheduler.quiet(LIMIT):
                assert not running

    run_on_threads(enter_or_schedule, range(6))
    scheduler.join(LIMIT)
    assert scheduler.cluster.statistics().finished == 150


def test_an_error_of_what_ran_is_raised_by_the_next_join_and_not_by_quiet(scheduler: Scheduler) -> None:
    scheduler.schedule(fail, "step")
    with pytest.raises(KeyError), scheduler.quiet(LIMIT):
        raise KeyError
    with pytest.raises(ZeroDivisionError):
        scheduler.join(LIMIT)
    scheduler.schedule(index_of, "step").result(LIMIT)


def test_close_inside_cancels_what_waits_and_close_elsewhere_ends_the_wait(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime) as scheduler:
        with scheduler.quiet(LIMIT):
            future = scheduler.schedule(index_of, "step")
            scheduler.close()
        assert future.exception(LIMIT) is not None
        with pytest.raises(StrategyClosedError), scheduler.quiet():
            pass
    with running_scheduler(FakeRuntime()) as scheduler:
        hold(scheduler)
        with quiet_on_a_thread(scheduler) as is_quiet:
            scheduler.close()
        assert not is_quiet.is_set()


def test_waits_that_could_not_end_are_refused(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, max_queued_closures=2)) as scheduler:
        with scheduler.quiet(LIMIT):
            with pytest.raises(RuntimeError, match="join was called inside"):
                scheduler.join()
            futures = [scheduler.schedule(index_of, "step") for _ in range(2)]
            with pytest.raises(RuntimeError, match="schedule would wait for room"):
                scheduler.schedule(index_of, "step")
        for future in futures:
            future.result(LIMIT)
        refused = []

        def enter(_: object) -> None:
            try:
                scheduler.quiet()
            except RuntimeError as error:
                refused.append(str(error))

        gate, [future] = hold(scheduler)
        future.add_done_callback(enter)
        gate.open()
        scheduler.join(LIMIT)
        assert "quiet was called on a worker's thread" in refused[0]
    with pytest.raises(RuntimeError, match="A quiet period cannot begin"):
        scheduler.quiet()


def test_a_worker_that_waits_for_the_others_goes_on(runtime: FakeRuntime) -> None:
    # The heartbeat, after which an idle worker would be reported by itself, is longer than the test may take.
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, heartbeat_interval=4 * LIMIT)) as scheduler:
        idle: set[int] = set()

        def report(worker: int) -> None:
            with runtime.changed:
                idle.add(worker)
                runtime.changed.notify_all()

        def wait_for_the_other(worker: int) -> int:
            runtime.wait_at_gate(worker, lambda: 1 - worker in idle)
            return worker

        scheduler.cluster.add_idle_callback(report)
        scheduler.schedule(index_of, "step", worker=1).result(LIMIT)
        future = scheduler.schedule(wait_for_the_other, "step", worker=0)
        wait_until(lambda: scheduler.cluster.statistics().running == 1)
        with scheduler.quiet(LIMIT):
            assert future.done()
            assert idle == {0, 1}


def test_cancel_all_inside_withdraws_what_waits(scheduler: Scheduler) -> None:
    with scheduler.quiet(LIMIT):
        future = scheduler.schedule(index_of, "step")
        scheduler.cancel_all()
        assert future.cancelled()
        later = scheduler.schedule(index_of, "step")
    later.result(LIMIT)
