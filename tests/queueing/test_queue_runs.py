"""Tests of many runs of one closure: in order, by need, and of which only those that were lost are made again."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.errors import ClosureQuarantined, WorkerLost
from coordinator.queueing.closure import RunsFuture
from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, check_events, index_of, running_scheduler
from tests.workers.finite_data import FiniteData, shards
from tests.workers.fusible_steps import FOUR, SAME_KEY, behind_a_gate
from tests.workers.test_quiet import quiet_on_a_thread


class UserError(Exception):
    """The error of a run."""


class Counted:
    """Work that returns how often it was called before, and does something at one of the calls."""

    def __init__(self, at: int = -1, action: Callable[[int], Any] | None = None) -> None:
        self.calls = 0
        self._at = at
        self._action = action
        self._lock = threading.Lock()

    def __call__(self, worker: int) -> int:
        with self._lock:
            number = self.calls
            self.calls += 1
        if number == self._at and self._action is not None:
            self._action(worker)
        return number


def schedule(scheduler: Scheduler, work: Callable[[int], Any], steps: int, **settings: Any) -> RunsFuture:
    future = scheduler.schedule(work, "step", steps=steps, **settings)
    assert isinstance(future, RunsFuture)
    return future


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


@pytest.mark.parametrize("key", [None, SAME_KEY], ids=["alone", "fused"])
def test_results_are_in_the_order_of_the_runs_and_all_runs_are_counted(
    runtime: FakeRuntime, key: FusionKey | None
) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, Counted(), 100, fusion_key=key)
        assert future.result(LIMIT) == list(range(100))
        scheduler.join(LIMIT)
        assert (future.completed, future.done(), future.running()) == (100, True, False)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.workers[0].finished, statistics.retried) == (100, 100, 0)
        check_events(scheduler)
    assert {size for _, size in runtime.fused_calls} <= ({4, 2} if key else set())


def test_a_future_counts_the_runs_that_have_ended(runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, Counted(5, gate), 40)
        gate.wait_arrived()
        assert (future.completed, future.done(), future.running()) == (5, False, True)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.waiting + statistics.running) == (5, 35)
        called: list[object] = []
        future.add_done_callback(called.append)
        gate.open()
        scheduler.join(LIMIT)
        assert (future.completed, called) == (40, [future])


def test_only_the_runs_of_a_lost_call_are_made_again(runtime: FakeRuntime) -> None:
    work = Counted(21, lambda worker: (runtime.kill(worker), runtime.restart(worker)))
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, work, 100, fusion_key=SAME_KEY)
        result = future.result(LIMIT)
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.workers[0].losses) == (100, 1)
        assert 1 <= statistics.retried <= 4
        assert work.calls == 100 + statistics.retried
        # The lost results are missing, and no others.
        assert len(result) == len(set(result)) == 100
        check_events(scheduler)


def test_runs_that_keep_killing_workers_end_with_an_error(runtime: FakeRuntime) -> None:
    def kill(worker: int) -> None:
        runtime.kill(worker)
        runtime.restart(worker)

    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, kill, 100)
        assert isinstance(future.exception(LIMIT), ClosureQuarantined)
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.failed, statistics.cancelled, statistics.finished) == (1, 99, 0)
        check_events(scheduler)


@pytest.mark.parametrize("stop_on_error", [True, False])
def test_the_error_of_one_run_is_that_of_the_future_and_ends_the_others(stop_on_error: bool) -> None:
    runtime = FakeRuntime(2)

    def fail(worker: int) -> None:
        raise UserError

    options = dataclasses.replace(FOUR, stop_on_error=stop_on_error)
    with running_scheduler(runtime, options) as scheduler:
        work = Counted(30, fail)
        future = schedule(scheduler, work, 1000)
        assert isinstance(future.exception(LIMIT), UserError)
        if stop_on_error:
            with pytest.raises(UserError):
                scheduler.join(LIMIT)
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.failed, statistics.finished + statistics.cancelled) == (1, 999)
        check_events(scheduler)


def test_runs_that_fail_together_are_made_again_alone(runtime: FakeRuntime) -> None:
    failures = iter([True])

    def fail_once(worker: int) -> None:
        if next(failures, False):
            raise UserError

    with running_scheduler(runtime, FOUR) as scheduler:
        work = Counted(21, fail_once)
        future = schedule(scheduler, work, 100, fusion_key=SAME_KEY)
        assert len(future.result(LIMIT)) == 100
        scheduler.join(LIMIT)
        assert scheduler.cluster.statistics().retried == work.calls - 100 + 2
        assert all(size == 4 for _, size in runtime.fused_calls)


def test_cancelled_runs_end_and_the_strategy_goes_on() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, gate, 100)
        gate.wait_arrived(2)
        assert future.cancel()
        assert future.cancelled()
        assert not schedule(scheduler, index_of, 1, worker=1).cancelled()
        scheduler.join(LIMIT)
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.cancelled) == (1, 100)
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(LIMIT)
        check_events(scheduler)


def test_cancel_all_ends_runs_that_wait_and_that_run() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, gate, 100)
        gate.wait_arrived(2)
        scheduler.cancel_all()
        assert future.cancelled()
        assert scheduler.done()
        assert scheduler.cluster.statistics().cancelled == 100


def test_a_slow_worker_makes_fewer_runs() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)

    def slow_on_0(worker: int) -> int:
        return gate(worker) if worker == 0 else worker

    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, slow_on_0, 100)
        gate.wait_arrived()
        # The slow worker has the run that it makes, and no other.
        wait_until(lambda: future.completed == 99)
        assert not future.done()
        gate.open()
        assert len(future.result(LIMIT)) == 100
        scheduler.join(LIMIT)
        slow, fast = scheduler.cluster.statistics().workers
        assert (slow.finished, fast.finished) == (1, 99)


def test_a_worker_that_is_added_takes_part() -> None:
    runtime = FakeRuntime(1)
    gate = Gate(runtime)

    def gate_on_0(worker: int) -> int:
        return gate(worker) if worker == 0 else worker

    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, gate_on_0, 100)
        gate.wait_arrived()
        scheduler.cluster.add_worker("new:2222")
        wait_until(lambda: future.completed == 99)
        gate.open()
        assert len(future.result(LIMIT)) == 100


def test_runs_that_a_removed_worker_has_not_begun_are_made_by_others() -> None:
    runtime = FakeRuntime(2)
    gates = [Gate(runtime), Gate(runtime)]
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, lambda worker: gates[worker](worker), 100)
        for gate in gates:
            gate.wait_arrived()
        removing = threading.Thread(target=scheduler.cluster.remove_worker, args=[0])
        removing.start()
        wait_until(lambda: len(scheduler.cluster.workers) == 1)
        gates[0].open()
        removing.join(LIMIT)
        gates[1].open()
        assert sorted(future.result(LIMIT)) == [0, *[1] * 99]


def test_what_the_library_schedules_does_not_wait_for_the_end_of_many_runs(runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    order: list[str] = []

    def step(worker: int) -> None:
        gate(worker)
        order.append("step")

    with running_scheduler(runtime) as scheduler:
        schedule(scheduler, step, 50)
        gate.wait_arrived()
        scheduler.schedule_internal(0, lambda _: order.append("internal"), "internal")
        gate.open()
        scheduler.join(LIMIT)
    assert order.index("internal") == 1
    assert order.count("step") == 50


def test_a_quiet_period_begins_between_two_runs(runtime: FakeRuntime) -> None:
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, gate, 1000)
        gate.wait_arrived()
        with quiet_on_a_thread(scheduler) as is_quiet:
            gate.open()
            assert is_quiet.wait(LIMIT)
            assert future.completed == 1
            assert scheduler.cluster.statistics().running == 0
        assert len(future.result(LIMIT)) == 1000


def test_runs_end_where_the_data_ends_and_go_on_where_it_does_not() -> None:
    runtime, data = FakeRuntime(2), FiniteData(range(10), range(10, 100))
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, data, 100, inputs=(data.input,), fusion_key=SAME_KEY)
        assert sorted(future.result(LIMIT)) == list(range(100))
        scheduler.join(LIMIT)
        assert set(data.taken.values()) == {1}
        check_events(scheduler)


def test_more_runs_than_there_are_data_end_with_its_error() -> None:
    runtime, data = FakeRuntime(2), FiniteData(*shards(50, 2))
    with running_scheduler(runtime, FOUR) as scheduler:
        future = schedule(scheduler, data, 60, inputs=(data.input,), fusion_key=SAME_KEY)
        assert isinstance(future.exception(LIMIT), EndOfDataError)
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
        assert future.completed == 50
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.failed + statistics.cancelled) == (50, 10)
        assert set(data.taken.values()) == {1}
        check_events(scheduler)


def test_a_run_that_exceeds_its_timeout_is_made_on_another_worker() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)

    def slow_on_0(worker: int) -> int:
        return gate(worker) if worker == 0 else worker

    with running_scheduler(runtime) as scheduler:
        future = schedule(scheduler, slow_on_0, 20, timeout=0.01, fusion_key=SAME_KEY)
        assert future.result(LIMIT) == [1] * 20
        gate.open()
    assert runtime.fused_calls == []


def test_runs_for_one_worker_fail_with_it() -> None:
    runtime = FakeRuntime(2)
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        held = scheduler.schedule(gate, "gate", worker=0)
        future = schedule(scheduler, index_of, 10, worker=0)
        gate.wait_arrived()
        removing = threading.Thread(target=scheduler.cluster.remove_worker, args=[0])
        removing.start()
        assert isinstance(future.exception(LIMIT), WorkerLost)
        gate.open()
        removing.join(LIMIT)
        assert held.result(LIMIT) == 0
        with pytest.raises(WorkerLost):
            scheduler.join(LIMIT)
        assert schedule(scheduler, index_of, 10, worker=1).result(LIMIT) == [1] * 10


def test_runs_wait_for_their_arguments_and_count_as_waiting(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime) as scheduler:
        gate = behind_a_gate(scheduler, runtime, None)
        needed = scheduler.schedule(index_of, "argument")
        future = schedule(scheduler, index_of, 10, after=[needed])
        assert scheduler.cluster.statistics().waiting == 11
        gate.open()
        assert future.result(LIMIT) == [0] * 10


def test_a_full_queue_takes_many_runs_when_there_is_room_for_one(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, max_queued_closures=2)) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        future = schedule(scheduler, index_of, 10)
        scheduling = threading.Thread(target=scheduler.schedule, args=[index_of, "next"])
        scheduling.start()
        gate.open()
        assert future.result(LIMIT) == [0] * 10
        scheduling.join(LIMIT)
        scheduler.join(LIMIT)
        assert scheduler.cluster.statistics().finished == 12


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_wrong_number_of_steps_is_refused(runtime: FakeRuntime, steps: Any) -> None:
    with running_scheduler(runtime) as scheduler, pytest.raises((ValueError, TypeError), match="steps"):
        scheduler.schedule(index_of, "step", steps=steps)


def test_ctrl_c_in_a_callback_of_cancelled_runs_lets_join_return(runtime: FakeRuntime) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        scheduler.schedule(gate, "gate")
        gate.wait_arrived()
        future = schedule(scheduler, index_of, 4)
        future.add_done_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
        gate.open()
        scheduler.join(LIMIT)
        assert future.cancelled()
