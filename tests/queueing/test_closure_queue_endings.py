"""Tests of the queue without workers: cancellation, stopping, and when callbacks run."""

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError, StrategyClosedError
from coordinator.queueing.closure import Attempt, ErrorScope, shared_cancellations
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.statistics import ClusterStatistics
from tests.deadline import LIMIT
from tests.queueing.closure_queue_bench import Stalls, fail, new_closure, new_internal, new_queue, put_new, take


@pytest.fixture
def stalls() -> Stalls:
    return Stalls()


@pytest.fixture
def queue(stalls: Stalls) -> ClosureQueue:
    return new_queue(stalls)


# Cancellation by the user


def test_a_cancelled_closure_is_not_run_and_join_does_not_wait_for_it(queue: ClosureQueue) -> None:
    cancelled, kept = put_new(queue, 1), put_new(queue, 2)
    assert cancelled.future.cancel()
    assert cancelled.future.cancel()
    attempt = take(queue)
    assert attempt.closure is kept
    queue.requeue(attempt)
    queue.finish([take(queue)], [None])
    queue.wait_settled(LIMIT)
    assert not kept.future.cancel()
    assert (queue.statistics().cancelled, queue.statistics().finished) == (1, 1)


@pytest.mark.parametrize("outcome", ["result", "error", "handed back"])
def test_a_closure_cancelled_while_it_runs_ends_at_once_and_its_attempt_is_awaited(
    queue: ClosureQueue, outcome: str
) -> None:
    closure = put_new(queue)
    attempt = take(queue)
    assert closure.future.running()
    assert closure.future.cancel()
    assert closure.future.cancelled()
    assert not closure.future.running()
    assert attempt.cancellation.is_cancelled
    with pytest.raises(TimeoutError):
        queue.wait_settled(timeout=0)
    match outcome:
        case "result":
            queue.finish([attempt], ["too late"])
        case "error":
            queue.fail(attempt, KeyError("too late"), ErrorScope.ALL_CLOSURES)
        case _:
            queue.requeue(attempt)
    queue.wait_settled(LIMIT)
    assert closure.future.cancelled()
    assert queue.statistics() == ClusterStatistics(waiting=0, running=0, finished=0, failed=0, cancelled=1, retried=0)


# Stopping


def test_stop_withdraws_waiting_and_cancels_running_closures_and_ends_workers(stalls: Stalls) -> None:
    queue = new_queue(stalls, capacity=2)
    running, waiting, targeted = put_new(queue, 1), put_new(queue, 2), new_internal(queue, 3, target=7)
    attempt = take(queue)
    put_new(queue, 4)
    queue.put(targeted)
    with ThreadPoolExecutor() as pool:
        putting, joining = pool.submit(put_new, queue, 99), pool.submit(queue.wait_settled, LIMIT)
        stalls.wait_for("room for closure 99")
        stalls.wait_for("join waits")
        queue.stop()
        queue.stop()
        with pytest.raises(StrategyClosedError, match="closure 99"):
            putting.result(LIMIT)
        assert attempt.cancellation.is_cancelled
        for closure in (waiting, targeted):
            with pytest.raises(ClosureCancelledError, match="the strategy was closed"):
                closure.future.result(0)
        assert not joining.done()
        queue.requeue(attempt)
        joining.result(LIMIT)
    assert isinstance(running.future.exception(0), ClosureCancelledError)
    assert queue.take(0) is None
    assert queue.statistics().cancelled == 5
    for late in (new_closure(queue), new_internal(queue, target=0)):
        with pytest.raises(StrategyClosedError, match="is closed"):
            queue.put(late)


# When callbacks run and references are dropped


def test_callbacks_run_without_a_lock_while_the_closure_still_counts_as_running(queue: ClosureQueue) -> None:
    running: list[int] = []

    def cancel(attempt: Attempt) -> None:
        attempt.closure.future.cancel()
        queue.requeue(attempt)

    ends: list[Callable[[Attempt], object]] = [
        lambda attempt: queue.finish([attempt], [None]),
        lambda attempt: fail(queue, attempt, KeyError("outcome")),
        cancel,
    ]
    for number, end in enumerate(ends):
        closure = put_new(queue, number)
        closure.future.add_done_callback(lambda _: running.append(queue.statistics().running))
        end(take(queue))
        with contextlib.suppress(KeyError):
            queue.wait_settled(LIMIT)
    assert running == [1, 1, 1]


class Argument:
    """An argument with a finalizer, such as an iterator."""


@pytest.mark.parametrize("end", ["finish", "fail", "cancel", "withdraw", "discard", "stop"])
def test_arguments_are_dropped_with_no_lock_held(queue: ClosureQueue, end: str) -> None:
    counted: list[ClusterStatistics] = []
    argument = Argument()
    pool = ThreadPoolExecutor()
    # Would time out if the lock were held.
    weakref.finalize(argument, lambda: counted.append(pool.submit(queue.statistics).result(LIMIT)))
    closure = put_new(queue, work=argument)
    del argument

    def cancel(attempt: Attempt) -> None:
        attempt.closure.future.cancel()
        queue.requeue(attempt)

    endings: dict[str, Callable[[], object]] = {
        "finish": lambda: queue.finish([take(queue)], [None]),
        "fail": lambda: fail(queue, take(queue), KeyError()),
        "cancel": lambda: cancel(take(queue)),
        "withdraw": lambda: queue.fail_all(KeyError(), if_idle=False),
        "discard": closure.future.cancel,
        "stop": queue.stop,
    }
    endings[end]()
    assert len(counted) == 1
    pool.shutdown()


class Counted:
    """A `Cancellation` that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def cancel(self) -> None:
        self.count += 1


def test_a_call_continues_when_one_of_its_closures_is_cancelled() -> None:
    call = Counted()
    first, second, third = shared_cancellations(call, 3)
    first.cancel()
    first.cancel()
    third.cancel()
    assert call.count == 0
    second.cancel()
    assert call.count == 1
    second.cancel()
    assert call.count == 1
