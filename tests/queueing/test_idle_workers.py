"""Tests of which idle workers are woken when there is a closure, and which are not."""

import contextlib
import queue as queues
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.queueing.queue_state import IdleWorker, QueueState
from coordinator.testing.fake_runtime import FakeCancellation
from tests.deadline import LIMIT, wait_until
from tests.queueing.closure_queue_bench import Stalls, new_closure, new_internal, new_queue, put_new

WORKERS = 32


@pytest.fixture
def queue() -> ClosureQueue:
    return new_queue(Stalls(), capacity=1000)


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each worker has woken up because it was to."""
    counts: Counter[int] = Counter()
    wait = IdleWorker.wait

    def count(idle: IdleWorker, timeout: float | None) -> bool:
        was_woken = wait(idle, timeout)
        counts[idle.index] += was_woken
        return was_woken

    monkeypatch.setattr(IdleWorker, "wait", count)
    return counts


@contextlib.contextmanager
def asleep(
    queue: ClosureQueue, workers: int = WORKERS, timeout: float | None = None
) -> Iterator["queues.Queue[tuple[int, Attempt | None]]"]:
    """Makes each worker wait for one closure, and yields a queue of what they got. The end stops the closure queue."""
    got: queues.Queue[tuple[int, Attempt | None]] = queues.Queue()
    with ThreadPoolExecutor(workers) as pool:
        for worker in range(workers):
            pool.submit(lambda index: got.put((index, queue.take(index, timeout))), worker)
            wait_until(lambda: len(queue.idle_workers()) == worker + 1)  # noqa: B023 - called at once
        try:
            yield got
        finally:
            queue.stop()


def closure_taken(got: "queues.Queue[tuple[int, Attempt | None]]") -> tuple[int, Closure]:
    worker, attempt = got.get(timeout=LIMIT)
    assert attempt is not None
    assert attempt.worker == worker
    return worker, attempt.closure


def test_a_closure_wakes_only_the_worker_that_has_been_idle_for_longest(
    queue: ClosureQueue, woken: Counter[int]
) -> None:
    with asleep(queue) as got:
        for number in range(5):
            closure = put_new(queue, number)
            assert closure_taken(got) == (number, closure)
        assert woken == dict.fromkeys(range(5), 1)
        assert queue.idle_workers() == list(range(5, WORKERS))


@pytest.mark.parametrize("internal", [False, True])
def test_a_closure_for_one_worker_wakes_that_worker_alone(
    queue: ClosureQueue, woken: Counter[int], internal: bool
) -> None:
    with asleep(queue) as got:
        if internal:
            closure = new_internal(queue, target=17)
            queue.put(closure)
        else:
            closure = put_new(queue, target=17)
        assert closure_taken(got) == (17, closure)
        assert woken == {17: 1}


def unblocked(queue: ClosureQueue) -> Closure:
    closure = put_new(queue, blockers=1)
    assert queue.statistics().running == 0
    queue.unblock(closure)
    return closure


def requeued(queue: ClosureQueue) -> Closure:
    closure = put_new(queue, target=WORKERS + 1)
    attempt = queue.take(WORKERS + 1, LIMIT)
    assert attempt is not None
    closure.target = None
    queue.requeue(attempt)
    return closure


def overrun(queue: ClosureQueue) -> Closure:
    closure = put_new(queue, target=WORKERS + 1, timeout=0.0)
    queue.take(WORKERS + 1, LIMIT)
    closure.target = None
    # Once: the attempt that follows exceeds this limit at once, too.
    queue.requeue_overdue()
    return closure


@pytest.mark.parametrize("make_runnable", [unblocked, requeued, overrun])
def test_a_closure_that_becomes_runnable_wakes_one_worker(
    queue: ClosureQueue, woken: Counter[int], make_runnable: Callable[[ClosureQueue], Closure]
) -> None:
    with asleep(queue) as got:
        closure = make_runnable(queue)
        assert closure_taken(got) == (0, closure)
        assert woken == {0: 1}


def test_many_closures_wake_each_worker_once_and_none_waits_beside_an_idle_worker(
    queue: ClosureQueue, woken: Counter[int]
) -> None:
    with asleep(queue) as got:
        closures = [put_new(queue, number) for number in range(WORKERS)]
        taken = dict(closure_taken(got) for _ in range(WORKERS))
        assert woken == dict.fromkeys(range(WORKERS), 1)
        assert {closure.number for closure in taken.values()} == {closure.number for closure in closures}
        assert queue.statistics().waiting == 0


def test_no_worker_is_woken_while_paused_and_one_for_each_closure_afterwards(
    queue: ClosureQueue, woken: Counter[int]
) -> None:
    with asleep(queue) as got:
        queue.pause("a parameter server is lost")
        ordinary = [put_new(queue, number) for number in range(10)]
        own = new_closure(queue, 99, target=20)
        queue.put(own)
        assert queue.idle_workers() == list(range(WORKERS))
        queue.resume()
        taken = dict(closure_taken(got) for _ in range(11))
        assert taken.pop(20) is own
        assert sorted(closure.number for closure in taken.values()) == list(range(10))
        assert sorted(woken.values()) == [1] * 11
        assert len(ordinary) == 10


def test_an_interrupted_or_removed_worker_wakes_alone_without_a_closure(
    queue: ClosureQueue, woken: Counter[int]
) -> None:
    with asleep(queue) as got:
        queue.interrupt(3)
        assert got.get(timeout=LIMIT) == (3, None)
        queue.dismiss(4)
        assert got.get(timeout=LIMIT) == (4, None)
        queue.interrupt(3)
        queue.dismiss(3)
        assert woken == {3: 1, 4: 1}
        assert queue.take(4, LIMIT) is None


def test_a_worker_that_has_waited_long_enough_is_not_handed_anything_later(queue: ClosureQueue) -> None:
    for timeout in (-1, 0, 0.001):
        assert queue.take(0, timeout) is None
    assert queue.idle_workers() == []
    closure = put_new(queue)
    attempt = queue.take(1, LIMIT)
    assert attempt is not None
    assert attempt.closure is closure


def test_an_unused_cancellation_is_kept_for_the_workers_next_attempt() -> None:
    made: list[object] = []

    class Cancellation:
        def __init__(self) -> None:
            made.append(self)

        def cancel(self) -> None:
            raise AssertionError

    queue = ClosureQueue(10, Cancellation, print, stall_interval=LIMIT)
    for _ in range(3):
        assert queue.take(0, timeout=0) is None
    put_new(queue, 1), put_new(queue, 2)
    first, second = queue.take(0, LIMIT), queue.take(0, LIMIT)
    assert first is not None
    assert second is not None
    assert [first.cancellation, second.cancellation] == made


def test_only_a_few_workers_are_woken_at_a_time(queue: ClosureQueue) -> None:
    state = QueueState()
    for index in range(10):
        state.wait(index)
    for number in range(10):
        state.add(new_closure(queue, number))
        state.wake()
    assert list(state.idle) == [4, 5, 6, 7, 8, 9]
    del state.waking[2]
    state.wake()
    assert list(state.idle) == [5, 6, 7, 8, 9]
    # The only worker that may run a closure is woken at once.
    state.add(new_closure(queue, 10, target=8))
    state.wake(8)
    assert list(state.idle) == [5, 6, 7, 9]


def test_no_more_workers_are_woken_than_closures_wait(queue: ClosureQueue) -> None:
    state = QueueState()
    waits = [state.wait(index) for index in range(4)]
    for number in range(2):
        state.add(new_closure(queue, number))
        state.wake()
        state.wake()
    assert list(state.idle) == [2, 3]
    assert [each.wait(0) for each in waits] == [True, True, False, False]


def test_a_quiet_period_begins_after_what_woken_workers_take(queue: ClosureQueue) -> None:
    state, closures = QueueState(), [new_closure(queue, number) for number in range(2)]
    state.wait(0)
    for closure in closures:
        state.add(closure)
        state.wake()
    state.quiet[state] = threading.current_thread()
    assert not state.is_quiet
    cancellation = FakeCancellation(threading.Condition())
    assert state.start_next(1, cancellation) is None
    attempt = state.start_next(0, cancellation)
    assert attempt is not None
    assert attempt.closure is closures[0]


def test_a_worker_woken_in_a_quiet_period_starts_internal_closures_alone(queue: ClosureQueue) -> None:
    state, internal = QueueState(), new_internal(queue, target=0)
    state.quiet[state] = threading.current_thread()
    state.wait(0)
    for closure in (new_closure(queue), internal):
        state.add(closure)
        state.wake(closure.target)
    assert 0 in state.waking
    assert state.is_quiet
    cancellation = FakeCancellation(threading.Condition())
    attempt = state.start_next(0, cancellation)
    assert attempt is not None
    assert attempt.closure is internal
    assert state.start_next(0, cancellation) is None


def test_a_worker_whose_closure_another_has_taken_waits_on(
    queue: ClosureQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_wake, wait = threading.Event(), IdleWorker.wait

    def wake_late(idle: IdleWorker, timeout: float | None) -> bool:
        was_woken = wait(idle, timeout)
        assert may_wake.wait(LIMIT)
        return was_woken

    monkeypatch.setattr(IdleWorker, "wait", wake_late)
    with asleep(queue, workers=1) as got:
        closure = put_new(queue, 1)
        assert queue.idle_workers() == []
        attempt = queue.take(1, LIMIT)
        assert attempt is not None
        assert attempt.closure is closure
        may_wake.set()
        wait_until(lambda: queue.idle_workers() == [0])
        assert got.empty()
        following = put_new(queue, 2)
        assert closure_taken(got) == (0, following)


def test_a_worker_whose_wait_times_out_takes_a_closure_meant_for_a_waking_one(
    queue: ClosureQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_wake = threading.Event()
    wait = IdleWorker.wait

    def wake_late(idle: IdleWorker, timeout: float | None) -> bool:
        if idle.index == 9:
            wait_until(lambda: queue.statistics().waiting == 5)
            return False
        was_woken = wait(idle, timeout)
        assert may_wake.wait(LIMIT)
        return was_woken

    monkeypatch.setattr(IdleWorker, "wait", wake_late)
    with asleep(queue, workers=10) as got:
        for number in range(5):
            put_new(queue, number)
        worker, closure = closure_taken(got)
        assert (worker, closure.number) == (9, 0)
        may_wake.set()
