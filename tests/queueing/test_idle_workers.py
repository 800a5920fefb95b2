"""Tests of which idle workers are woken when there is a closure, and of the callbacks for workers that become idle."""

import contextlib
import queue as queues
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.queueing.queue_state import IdleWorker, QueueState
from coordinator.testing.fake_runtime import FakeCancellation
from tests.deadline import LIMIT, wait_until
from tests.queueing.closure_queue_bench import Stalls, new_closure, new_internal, new_queue, put_new
from tests.virtual_clock import VirtualClock

WORKERS = 32


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def queue(clock: VirtualClock) -> ClosureQueue:
    return new_queue(Stalls(), capacity=1000, clock=clock)


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
        # One for a certain worker wakes that one alone.
        own, internal = new_closure(queue, target=17), new_internal(queue, target=21)
        for closure in (own, internal):
            queue.put(closure)
            assert closure_taken(got) == (closure.target, closure)
        assert woken == {**dict.fromkeys(range(5), 1), 17: 1, 21: 1}


def test_a_closure_that_becomes_runnable_wakes_one_worker(
    queue: ClosureQueue, clock: VirtualClock, woken: Counter[int]
) -> None:
    with asleep(queue) as got:
        blocked = put_new(queue, 0, blockers=1)
        assert queue.statistics().running == 0
        queue.unblock(blocked)
        assert closure_taken(got) == (0, blocked)
        requeued, overrun = (put_new(queue, 1, target=WORKERS, timeout=timeout) for timeout in (None, 5.0))
        attempts = [queue.take(WORKERS, LIMIT) for _ in range(2)]
        requeued.target = overrun.target = None
        queue.requeue(attempts[0])
        assert closure_taken(got) == (1, requeued)
        assert queue.requeue_overdue() == 5.0
        clock.advance(5.0)
        assert queue.requeue_overdue() is None
        assert closure_taken(got) == (2, overrun)
        assert woken == {0: 1, 1: 1, 2: 1}


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


def test_only_a_few_workers_are_woken_at_a_time_and_no_more_than_closures_wait(queue: ClosureQueue) -> None:
    state = QueueState(queue.clock.now)
    for index in range(10):
        state.wait(index)
    for number in range(10):
        state.add(new_closure(queue, number))
        state.wake()
        state.wake()
        assert len(state.idle) == 10 - min(number + 1, 4)
    assert list(state.idle) == [4, 5, 6, 7, 8, 9]
    del state.waking[2]
    state.wake()
    assert list(state.idle) == [5, 6, 7, 8, 9]
    # The only worker that may run a closure is woken at once.
    state.add(new_closure(queue, 10, target=8))
    state.wake(8)
    assert list(state.idle) == [5, 6, 7, 9]


def test_a_quiet_period_begins_after_what_woken_workers_take(queue: ClosureQueue) -> None:
    state, closures = QueueState(queue.clock.now), [new_closure(queue, number) for number in range(2)]
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
