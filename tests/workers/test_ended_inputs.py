"""Tests of closures whose data ends on one worker after the other: who runs them, and when that is an error."""

import contextlib
import dataclasses
from collections import Counter
from typing import Any

import pytest

from coordinator.errors import WorkerLost
from coordinator.future import Future
from coordinator.options import Options
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, running_scheduler
from tests.virtual_clock import VirtualClock
from tests.workers.fusible_steps import FiniteData, shards

EXAMPLES = 103
WITHOUT_STOP = dataclasses.replace(OPTIONS, stop_on_error=False)


def schedule_until_the_end(scheduler: Scheduler, data: FiniteData) -> list[Future]:
    futures = []
    with contextlib.suppress(EndOfDataError):
        while True:
            futures.append(data.schedule(scheduler))
    return futures


def hold_and_withdraw(scheduler: Scheduler, data: FiniteData) -> tuple[Gate, Future]:
    """Keeps worker 1, which alone has data left, busy, so that a closure whose data ended on worker 0 waits apart."""
    gate, _ = hold(scheduler, worker=1)
    future = data.schedule(scheduler)
    wait_until(lambda: scheduler.queue.statistics().retried)
    return gate, future


def results(futures: list[Future]) -> Counter[int]:
    """Counts the results of those that have one; the others raise EndOfDataError."""
    errors = [future.exception(LIMIT) for future in futures]
    assert all(error is None or isinstance(error, EndOfDataError) for error in errors)
    return Counter(future.result(0) for future, error in zip(futures, errors, strict=True) if error is None)


@pytest.mark.parametrize(
    "settings", [{}, {"stop_on_error": False}, {"max_queued_closures": 2}, {"steps_per_dispatch": 2}]
)
def test_a_loop_that_schedules_until_the_end_visits_every_example_once(settings: dict[str, Any]) -> None:
    with running_scheduler(FakeRuntime(3), dataclasses.replace(OPTIONS, **settings)) as scheduler:
        for _ in range(2):
            data = FiniteData(*shards(EXAMPLES, 3))
            futures = schedule_until_the_end(scheduler, data)
            scheduler.join(LIMIT)
            assert data.taken == dict.fromkeys(range(EXAMPLES), 1) == results(futures)
            # It is no more to be had later.
            with pytest.raises(EndOfDataError):
                data.schedule(scheduler)
            scheduler.join(LIMIT)
        assert scheduler.schedule(index_of, "step").result(LIMIT) in range(3)


@pytest.mark.parametrize("parts", [[range(40)], [range(40), ()], [range(37), range(37, 39), range(39, 40), ()]])
def test_join_raises_the_end_of_data_once_after_every_example(parts: list[range]) -> None:
    data = FiniteData(*parts)
    with running_scheduler(FakeRuntime(len(parts))) as scheduler:
        # The data ends while they are scheduled, or afterwards.
        gate, held = hold(scheduler, len(parts))
        futures = [data.schedule(scheduler) for _ in range(45)]
        gate.open()
        with pytest.raises(EndOfDataError) as raised:
            scheduler.join(LIMIT)
        scheduler.join(LIMIT)
        assert scheduler.done()
        assert data.taken == dict.fromkeys(range(40), 1) == results(futures)
        assert all(future.done() for future in held)
        assert "closure" in raised.value.__notes__[-1]
        statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.failed, statistics.cancelled) == (40 + len(parts), 5, 0)
    assert statistics.retried == len(parts) - 1


@pytest.mark.parametrize("options", [OPTIONS, WITHOUT_STOP])
def test_join_raises_no_end_of_data_if_there_is_another_error_or_errors_do_not_stop(options: Options) -> None:
    with running_scheduler(FakeRuntime(2), options) as scheduler:
        assert isinstance(FiniteData([], []).schedule(scheduler).exception(LIMIT), EndOfDataError)
        failed = scheduler.schedule(fail, "fail")
        assert isinstance(failed.exception(LIMIT), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError) if options is OPTIONS else contextlib.nullcontext():
            scheduler.join(LIMIT)
        scheduler.join(LIMIT)


def test_nothing_else_is_withdrawn_when_data_ends(scheduler: Scheduler) -> None:
    data = FiniteData([1], [2])
    gate, [running] = hold(scheduler, worker=0)
    waiting = scheduler.schedule(index_of, "other", worker=0)
    ending = [data.schedule(scheduler) for _ in range(3)]
    assert ending[0].result(LIMIT) == 2
    gate.open()
    assert (running.result(LIMIT), waiting.result(LIMIT)) == (0, 0)
    assert results(ending) == {1: 1, 2: 1}
    scheduler.settled(LIMIT)
    with pytest.raises(EndOfDataError):
        scheduler.done()
    assert scheduler.done()


def test_a_closure_for_one_worker_fails_at_the_end_of_that_workers_data(scheduler: Scheduler) -> None:
    data = FiniteData([1], [2, 3])
    gate, _ = hold(scheduler, worker=0)
    futures = [data.schedule(scheduler, worker=0) for _ in range(4)]
    gate.open()
    assert results(futures) == {1: 1}
    with pytest.raises(EndOfDataError):
        scheduler.join(LIMIT)
    with pytest.raises(EndOfDataError):
        data.schedule(scheduler, worker=0)
    others = [data.schedule(scheduler) for _ in range(2)]
    scheduler.join(LIMIT)
    assert results(others) == {2: 1, 3: 1}


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_lost_worker_is_waited_for_only_if_it_has_data_left(
    scheduler: Scheduler, runtime: FakeRuntime, is_ended: bool
) -> None:
    data = FiniteData([] if is_ended else [1, 2], [3])
    if is_ended:
        assert isinstance(data.schedule(scheduler, worker=0).exception(LIMIT), EndOfDataError)
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
    runtime.kill(0)
    assert scheduler.schedule(index_of, "step").result(LIMIT) in range(2)
    futures = [data.schedule(scheduler, worker=1), data.schedule(scheduler)]
    assert futures[0].result(LIMIT) == 3
    if is_ended:
        assert isinstance(futures[1].exception(LIMIT), EndOfDataError)
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
        return
    with pytest.raises(TimeoutError):
        scheduler.join(0.01)
    runtime.restart(0)
    assert futures[1].result(LIMIT) == 1
    scheduler.join(LIMIT)


def test_without_the_removed_worker_that_had_data_left_closures_fail(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    data = FiniteData([], [1])
    gate, future = hold_and_withdraw(scheduler, data)
    gate.open()
    scheduler.join(LIMIT)
    assert future.result(0) == 1
    runtime.kill(1)
    future = data.schedule(scheduler)
    scheduler.cluster.remove_worker(1, timeout=LIMIT)
    assert isinstance(future.exception(LIMIT), EndOfDataError)
    with pytest.raises(EndOfDataError):
        scheduler.join(LIMIT)


def test_a_worker_with_data_left_is_waited_for_as_long_as_its_own_closures_are(
    runtime: FakeRuntime, clock: VirtualClock
) -> None:
    data = FiniteData([], [1])
    runtime.kill(1)
    with running_scheduler(runtime, clock=clock) as scheduler:
        wait_until(lambda: scheduler.cluster.workers[1].state is WorkerState.LOST)
        futures = [data.schedule(scheduler) for _ in range(3)]
        clock.advance(OPTIONS.affinity_timeout)
        assert all(isinstance(future.exception(LIMIT), WorkerLost) for future in futures)
        with pytest.raises(WorkerLost, match=r"Data is left on /job:worker/replica:0/task:1 alone.*affinity_timeout"):
            data.schedule(scheduler)
        scheduler.join(LIMIT)
        runtime.restart(1)
        wait_until(scheduler.cluster.workers[1].healthy)
        assert data.schedule(scheduler).result(LIMIT) == 1


def test_cancelling_all_withdraws_what_waits_apart_and_the_end_of_data(scheduler: Scheduler) -> None:
    data, ended = FiniteData([], [1]), FiniteData([], [])
    assert isinstance(ended.schedule(scheduler).exception(LIMIT), EndOfDataError)
    _, future = hold_and_withdraw(scheduler, data)
    futures = [future, *(data.schedule(scheduler) for _ in range(2))]
    scheduler.cancel_all()
    assert all(future.cancelled() for future in futures)
    scheduler.join(LIMIT)
    assert data.schedule(scheduler).result(LIMIT) == 1


def test_data_of_a_reconnected_worker_begins_again_and_that_of_an_added_one_is_read() -> None:
    runtime, data = FakeRuntime(1), FiniteData([1, 2], [3])
    with running_scheduler(runtime) as scheduler:
        schedule_until_the_end(scheduler, data)
        data.rewind(0)
        with pytest.raises(EndOfDataError):
            data.schedule(scheduler)
        losses = scheduler.cluster.workers[0].statistics().reconnections
        runtime.restart(0)
        wait_until(lambda: scheduler.cluster.workers[0].statistics().reconnections > losses)
        schedule_until_the_end(scheduler, data)
        scheduler.cluster.add_worker("worker1:2222")
        assert data.schedule(scheduler).result(LIMIT) == 3
        schedule_until_the_end(scheduler, data)
    assert data.taken == {1: 2, 2: 2, 3: 1}
