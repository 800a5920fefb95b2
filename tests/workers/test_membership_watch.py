"""Tests of workers that are added, removed and moved while closures run, in memory."""

import dataclasses
import logging
import threading

import pytest

from coordinator.errors import WorkerLost
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler, WorkerAddresses, change_between
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, hold, index_of, running_scheduler

PRESENT = {0: "a:1", 1: "b:1", 2: "c:1"}


@pytest.mark.parametrize(
    ("lost", "wanted", "change"),
    [
        ([], ["a:1", "b:1", "c:1"], ({}, [], [])),
        ([], ["c:1", "b:1", "a:1"], ({}, [], [])),
        ([], ["a:1", "b:1", "c:1", "d:1", "d:1"], ({}, [], ["d:1"])),
        ([], ["a:1", "c:1"], ({}, [1], [])),
        ([], ["a:1", "d:1", "c:1"], ({}, [1], ["d:1"])),
        ([1], ["a:1", "d:1", "c:1"], ({1: "d:1"}, [], [])),
        ([1, 2], ["d:1", "a:1", "e:1", "f:1"], ({1: "d:1", 2: "e:1"}, [], ["f:1"])),
        ([0, 2], ["b:1", "d:1"], ({0: "d:1"}, [2], [])),
        ([1], ["a:1", "b:1", "c:1"], ({}, [], [])),
        ([1], {0: "a:1", 4: "e:1", 2: "c:1", 3: "d:1"}, ({}, [1], ["d:1", "e:1"])),
        ([], {0: "a:1", 1: "d:1", 2: "c:1"}, ({1: "d:1"}, [], [])),
    ],
)
def test_the_plan_follows_from_current_and_wanted_workers(
    lost: list[int], wanted: WorkerAddresses, change: tuple[dict[int, str], list[int], list[str]]
) -> None:
    assert change_between(PRESENT, lost, wanted) == change


def test_a_worker_that_is_added_takes_work() -> None:
    with running_scheduler(FakeRuntime(1)) as scheduler:
        gate, [held] = hold(scheduler)
        waiting = scheduler.schedule(index_of, "step")
        assert scheduler.cluster.add_worker("new:1") == 1
        assert waiting.result(LIMIT) == 1
        assert [worker.index for worker in scheduler.cluster.workers] == [0, 1]
        assert len(scheduler.cluster.statistics().workers) == 2
        gate.open()
        assert held.result(LIMIT) == 0
        with pytest.raises(ValueError, match="new:1"):
            scheduler.cluster.add_worker("new:1")


def test_a_removed_worker_finishes_its_closure_and_frees_its_number(scheduler: Scheduler) -> None:
    gate, futures = hold(scheduler, 2)
    removing = threading.Thread(target=scheduler.cluster.remove_worker, args=(0,))
    removing.start()
    wait_until(lambda: len(scheduler.cluster.workers) == 1)
    gate.open()
    removing.join(LIMIT)
    assert sorted(future.result(LIMIT) for future in futures) == [0, 1]
    assert {scheduler.schedule(index_of, "step").result(LIMIT) for _ in range(20)} == {1}
    assert scheduler.cluster.add_worker("new:1") == 0
    assert scheduler.schedule(index_of, "step", worker=0).result(LIMIT) == 0
    scheduler.join(LIMIT)
    assert scheduler.cluster.statistics().retried == 0


def test_a_lost_worker_can_be_removed_and_its_own_closures_fail(scheduler: Scheduler, runtime: FakeRuntime) -> None:
    runtime.kill(0)
    wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
    doomed = scheduler.schedule(index_of, "doomed", worker=0)
    scheduler.cluster.remove_worker(0)
    assert isinstance(doomed.exception(LIMIT), WorkerLost)
    with pytest.raises(WorkerLost, match=r"closure 0 \(doomed\) may run only on worker 0, which was removed"):
        scheduler.join(LIMIT)
    with pytest.raises(ValueError, match=r"no worker 0; there are \[1\]"):
        scheduler.schedule(index_of, "late", worker=0)
    with pytest.raises(ValueError, match=r"no worker 0 to remove; there are \[1\]"):
        scheduler.cluster.remove_worker(0)


def test_a_worker_that_moved_is_lost_and_reconnected_at_its_new_address(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    runtime.kill(0)
    wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
    scheduler.cluster.move_worker(0, "elsewhere:1")
    assert runtime.worker_addresses[0] == "elsewhere:1"
    gate, [held] = hold(scheduler, worker=0)
    scheduler.cluster.move_worker(0, "elsewhere:2")
    gate.wait_arrived(2)
    gate.open()
    assert held.result(LIMIT) == 0
    with pytest.raises(ValueError, match="no worker 5 to move"):
        scheduler.cluster.move_worker(5, "elsewhere:3")


def test_a_changed_cluster_description_is_followed_and_a_bad_one_ignored(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(workers=2)
    wanted: list[list[str] | Exception] = [[*runtime.worker_addresses.values()]]

    def read() -> list[str]:
        if isinstance(wanted[-1], Exception):
            raise wanted[-1]
        return wanted[-1]

    def indices() -> list[int]:
        return [worker.index for worker in scheduler.cluster.workers]

    with caplog.at_level(logging.WARNING, logger="coordinator"), running_scheduler(runtime) as scheduler:
        scheduler.follow(read, interval=0.001)
        wanted.append([*runtime.worker_addresses.values(), "new:1"])
        wait_until(lambda: indices() == [0, 1, 2])
        assert scheduler.schedule(index_of, "step", worker=2).result(LIMIT) == 2
        wanted.append(OSError("the file is gone"))
        wait_until(lambda: "OSError: the file is gone" in caplog.text)
        assert indices() == [0, 1, 2]
        wanted.append(["worker1:2222", "new:1"])
        wait_until(lambda: indices() == [1, 2])
        runtime.kill(1)
        wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
        wanted.append(["moved:1", "new:1"])
        assert scheduler.schedule(index_of, "step", worker=1).result(LIMIT) == 1
        assert runtime.worker_addresses == {1: "moved:1", 2: "new:1"}
    assert caplog.text.count("the file is gone") == 1
    assert "coordinator-membership" not in {thread.name for thread in threading.enumerate()}


def test_workers_that_have_indices_keep_them() -> None:
    runtime = FakeRuntime(workers=4)
    all_four = dict(runtime.worker_addresses)
    wanted = [all_four]
    interrupted = threading.Event()

    def indices() -> list[int]:
        return [worker.index for worker in scheduler.cluster.workers]

    with running_scheduler(runtime) as scheduler:
        scheduler.follow(lambda: wanted[-1], 0.001, interrupted.set)
        for present in ([0, 2], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 7]):
            wanted.append({index: all_four.get(index, "new:1") for index in present})
            wait_until(lambda: indices() == present)  # noqa: B023 - called in this turn alone
        assert runtime.worker_addresses == {**all_four, 7: "new:1"}
        with pytest.raises(ValueError, match=r"There is a worker 3 already; there are \[0, 1, 2, 3, 7\]"):
            scheduler.cluster.add_worker("newer:1", 3)
        with pytest.raises(ValueError, match="index must be"):
            scheduler.cluster.add_worker("newer:1", -1)
        assert not interrupted.is_set()
    assert interrupted.is_set()


def test_a_closure_that_a_removed_worker_gives_back_late_fails_and_is_not_waited_for(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, close_timeout=0.01)) as scheduler:
        _, [future] = hold(scheduler, worker=1)
        runtime.freeze(1)
        # The call cannot be cancelled, so that the worker is removed before it has ended.
        scheduler.cluster.remove_worker(1, timeout=0)
        assert "runs a call that cannot be cancelled; its thread is left behind" in caplog.text
        assert not future.done()
        runtime.thaw(1)
        assert isinstance(future.exception(LIMIT), WorkerLost)
        with pytest.raises(WorkerLost, match="may run only on worker 1, which was removed"):
            scheduler.join(LIMIT)


def test_the_removal_of_the_last_worker_is_logged_and_work_waits_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    with running_scheduler(FakeRuntime(1)) as scheduler:
        scheduler.cluster.remove_worker(0)
        assert "task:0 is removed; no worker is left, and functions wait until one is added" in caplog.text
        waiting = scheduler.schedule(index_of, "step")
        scheduler.cluster.add_worker("host:1")
        assert waiting.result(LIMIT) == 0
