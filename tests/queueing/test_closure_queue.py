"""Tests of the queue without workers: order, capacity, errors, endings, waits, and when callbacks run."""

import contextlib
import functools
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError, StrategyClosedError
from coordinator.queueing import closure_queue
from coordinator.queueing.closure import Attempt, Closure, ClosureState
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FiniteInput, FusionKey
from coordinator.statistics import ClusterStatistics
from coordinator.testing.fake_runtime import EndOfDataError
from tests.deadline import LIMIT, wait_until
from tests.queueing.closure_queue_bench import Stalls, fail, new_closure, new_internal, new_queue, put_new, take


@pytest.fixture
def stalls() -> Stalls:
    return Stalls()


@pytest.fixture
def queue(stalls: Stalls) -> ClosureQueue:
    return new_queue(stalls)


def put_with(queue: ClosureQueue, number: int, **attributes: object) -> Closure:
    closure = new_closure(queue, number)
    for name, value in attributes.items():
        setattr(closure, name, value)
    queue.put(closure, LIMIT)
    return closure


# Order


# row 1
def test_a_closure_is_pending_from_put_to_finish_also_when_requeued(queue: ClosureQueue) -> None:
    closure = put_new(queue)
    attempt = take(queue)
    assert attempt.closure is closure
    assert not queue.is_settled()
    queue.requeue(attempt)
    assert closure.state is ClosureState.WAITING
    attempt = take(queue, worker=1)
    assert attempt.closure is closure
    assert not queue.is_settled()
    queue.finish([attempt], ["result"])
    assert closure.state is ClosureState.DONE
    assert queue.is_settled()
    queue.wait_settled(LIMIT)
    queue.wait_settled(LIMIT)
    assert (closure.future.result(), closure.attempts) == ("result", 2)


# row 1
def test_first_in_is_first_out_and_requeued_closures_go_to_the_front(stalls: Stalls) -> None:
    queue = new_queue(stalls, capacity=2)
    first, second = put_new(queue, 1), put_new(queue, 2)
    attempt = take(queue)
    assert attempt.closure is first
    third = put_new(queue, 3)
    queue.requeue(attempt)
    assert [take(queue).closure for _ in range(3)] == [first, second, third]


# rows 2, 3
@pytest.mark.parametrize("capacity", [100, 1])
def test_consumers_that_requeue_neither_lose_nor_repeat_closures(stalls: Stalls, capacity: int) -> None:
    queue = new_queue(stalls, capacity)
    finished: Counter[int] = Counter()
    counting = threading.Lock()

    def consume(worker: int) -> None:
        has_handed_back = False
        while (attempt := queue.take(worker)) is not None:
            if not has_handed_back:
                has_handed_back = True
                queue.requeue(attempt)
                continue
            with counting:
                finished[attempt.closure.number] += 1
            queue.finish([attempt], [None])

    with ThreadPoolExecutor() as pool:
        consuming = [pool.submit(consume, worker) for worker in range(10)]
        for number in range(100):
            put_new(queue, number)
        queue.wait_settled(LIMIT)
        assert queue.is_settled()
        queue.stop()
        for consumer in consuming:
            consumer.result(LIMIT)
    assert finished == dict.fromkeys(range(100), 1)


# row 4
def test_an_internal_closure_goes_first_to_its_worker_and_join_ignores_it(queue: ClosureQueue) -> None:
    ordinary = put_new(queue)
    internal = new_internal(queue, 1, target=1)
    queue.put(internal)
    attempt = take(queue, worker=0)
    assert attempt.closure is ordinary
    queue.finish([attempt], [None])
    queue.wait_settled(LIMIT)
    another = put_new(queue)
    attempt = take(queue, worker=1)
    assert attempt.closure is internal
    queue.requeue(attempt)
    attempt = take(queue, worker=0)
    assert attempt.closure is another
    queue.finish([attempt], [None])
    assert queue.is_settled()
    attempt = take(queue, worker=1)
    assert attempt.closure is internal
    fail(queue, attempt, ValueError("not made"))
    queue.wait_settled(LIMIT)
    assert isinstance(internal.future.exception(), ValueError)


def test_a_batch_has_only_closures_for_all_workers(queue: ClosureQueue) -> None:
    fused = [put_with(queue, number, fusion_key=FusionKey("step", ())) for number in range(3)]
    attempt = take(queue, worker=1)
    for_worker = put_new(queue, 3, target=1)
    batch = queue.take_batch(attempt, 3, lambda available: available)
    assert [each.closure for each in batch] == fused
    assert take(queue, worker=1).closure is for_worker


def test_no_closure_joins_the_call_of_a_removed_worker(queue: ClosureQueue) -> None:
    for number in range(2):
        put_with(queue, number, fusion_key=FusionKey("step", ()))
    attempt = take(queue, worker=1)
    queue.dismiss(1)
    assert queue.take_batch(attempt, 2, lambda available: available) == [attempt]


def test_no_closure_joins_a_call_when_a_quiet_period_was_entered(queue: ClosureQueue, stalls: Stalls) -> None:
    for number in range(3):
        put_with(queue, number, fusion_key=FusionKey("step", ()))
    attempt = take(queue)
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as leaving:
        entering = pool.submit(leaving.enter_context, queue.quiet(None))
        # Without a time limit it says what it waits for.
        stalls.wait_for("No progress", "strategy.quiet() waits for functions that run", "closure 0 (step) on worker 0")
        assert queue.take_batch(attempt, 3, lambda available: available) == [attempt]
        queue.finish([attempt], [None])
        assert queue.take(0, timeout=0) is None
        queue.report_idle(0)
        entering.result(LIMIT)
        assert queue.statistics().waiting == 2


# Capacity


def test_put_on_a_full_queue_times_out_and_cancels_its_future(stalls: Stalls) -> None:
    queue = new_queue(stalls, capacity=1)
    put_new(queue, 1)
    late = new_closure(queue, 2)
    with pytest.raises(TimeoutError, match=r"room for closure 2 \(step\).*1 closures wait, running: nothing"):
        queue.put(late, timeout=0.001)
    assert isinstance(late.future.exception(), ClosureCancelledError)
    assert queue.statistics().waiting == 1


# row 8
@pytest.mark.parametrize("is_taken", [True, False])
def test_put_on_a_full_queue_continues_when_there_is_room(stalls: Stalls, is_taken: bool) -> None:
    queue = new_queue(stalls, capacity=1)
    first = put_new(queue, 1)
    with ThreadPoolExecutor() as pool:
        putting = pool.submit(put_new, queue, 2)
        stalls.wait_for("schedule waits for room for closure 2", "1 closures wait")
        assert (take(queue).closure is first) if is_taken else first.future.cancel()
        assert take(queue).closure is putting.result(LIMIT)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_loop_over_finite_data_that_is_far_ahead_pauses_for_a_moment(
    stalls: Stalls, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    assert closure_queue._MOMENT <= 0.01  # noqa: SLF001 - the promised limit
    monkeypatch.setattr(closure_queue, "_MOMENT", 2 * LIMIT if is_taken else 0.001)
    queue, data = new_queue(stalls, capacity=1000), FiniteInput(EndOfDataError)
    queue.admit(0)
    for number in range(129):
        put_with(queue, number, inputs=(data,))
    put_new(queue, 129)
    with ThreadPoolExecutor() as pool:
        putting = pool.submit(put_with, queue, 130, inputs=(data,))
        if is_taken:
            wait_until(lambda: queue._has_room.waiters)  # noqa: SLF001 - nothing else shows that a thread pauses
            assert queue.statistics().waiting == 130
            take(queue)
        putting.result(LIMIT)


# Errors


def raise_by_put(queue: ClosureQueue) -> None:
    closure = new_closure(queue, 99)
    try:
        queue.put(closure, LIMIT)
    finally:
        assert isinstance(closure.future.exception(0), ClosureCancelledError)


RAISERS = [raise_by_put, lambda queue: queue.wait_settled(LIMIT), ClosureQueue.is_settled]


# rows 38, 39, 40, 41
@pytest.mark.parametrize("raiser", RAISERS)
def test_the_first_error_is_raised_once_when_all_that_ran_has_ended(
    queue: ClosureQueue, stalls: Stalls, raiser: Callable[[ClosureQueue], None]
) -> None:
    failing, failing_later, cancelled, waiting = (put_new(queue, number) for number in range(4))
    first, later, running = (take(queue) for _ in range(3))
    first_error, later_error = ValueError("first"), KeyError("later")
    fail(queue, first, first_error)
    assert running.cancellation.is_cancelled
    with ThreadPoolExecutor() as pool:
        raising = pool.submit(raiser, queue)
        stalls.wait_for("0 closures wait", "closure 1 (step) on worker 0", "closure 2 (step) on worker 0")
        queue.requeue(running)
        fail(queue, later, later_error)
        assert raising.exception(LIMIT) is first_error
    assert failing.future.exception() is first_error
    assert failing_later.future.exception() is later_error
    for closure in (cancelled, waiting):
        with pytest.raises(ClosureCancelledError, match=r"another closure failed.*[Pp]lease reschedule"):
            closure.future.result()
    # The queue is usable again.
    assert queue.is_settled()
    queue.wait_settled(LIMIT)
    fresh = put_new(queue)
    attempt = take(queue)
    assert attempt.closure is fresh
    assert attempt.cancellation.is_cancelled is False
    queue.finish([attempt], ["fresh"])
    queue.wait_settled(LIMIT)


# rows 37, 40
def test_an_error_reaches_a_put_that_waits_for_room(stalls: Stalls) -> None:
    queue = new_queue(stalls, capacity=1)
    put_new(queue)
    failing = take(queue)
    put_new(queue)
    with ThreadPoolExecutor() as pool:
        putting = pool.submit(raise_by_put, queue)
        stalls.wait_for("room for closure 99")
        fail(queue, failing, ValueError("first"))
        with pytest.raises(ValueError, match="first"):
            putting.result(LIMIT)
    assert queue.is_settled()


def test_an_error_of_wider_scope_withdraws_only_waiting_closures(queue: ClosureQueue) -> None:
    queue.fail_all(ValueError("no thread waits"), if_idle=False)
    queue.wait_settled(LIMIT)
    waiting = put_new(queue)
    queue.fail_all(ValueError("lost"), if_idle=False)
    assert isinstance(waiting.future.exception(0), ClosureCancelledError)
    with pytest.raises(ValueError, match="lost"):
        queue.wait_settled(LIMIT)


def cancel(queue: ClosureQueue, attempt: Attempt) -> None:
    attempt.closure.future.cancel()
    queue.requeue(attempt)


ENDS: dict[str, Callable[[ClosureQueue, Attempt], object]] = {
    "finish": lambda queue, attempt: queue.finish([attempt], [None]),
    "fail": lambda queue, attempt: fail(queue, attempt, KeyError("outcome")),
    "cancel": cancel,
}


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


@pytest.mark.parametrize("outcome", [*ENDS])
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
    # Too late; what is cancelled is handed back.
    ENDS[outcome](queue, attempt)
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


def test_callbacks_run_without_a_lock_while_the_closure_still_counts_as_running(queue: ClosureQueue) -> None:
    running: list[int] = []
    for end in ENDS.values():
        closure = put_new(queue)
        closure.future.add_done_callback(lambda _: running.append(queue.statistics().running))
        end(queue, take(queue))
        with contextlib.suppress(KeyError):
            queue.wait_settled(LIMIT)
    assert running == [1, 1, 1]


class Argument:
    """An argument with a finalizer, such as an iterator."""


def test_arguments_are_dropped_with_no_lock_held(stalls: Stalls) -> None:
    withdrawals: dict[str, Callable[[ClosureQueue, Closure], object]] = {
        "withdraw": lambda queue, _: queue.fail_all(KeyError(), if_idle=False),
        "discard": lambda _, closure: closure.future.cancel(),
        "stop": lambda queue, _: queue.stop(),
    }
    with ThreadPoolExecutor() as pool:
        for end in (*ENDS, *withdrawals):
            queue = new_queue(stalls)
            counted: list[ClusterStatistics] = []
            argument = Argument()
            # Would time out if the lock were held.
            note = functools.partial(lambda queue, to: to.append(pool.submit(queue.statistics).result(LIMIT)), queue)
            weakref.finalize(argument, note, counted)
            closure = put_new(queue, work=argument)
            del argument
            ENDS[end](queue, take(queue)) if end in ENDS else withdrawals[end](queue, closure)
            assert len(counted) == 1, end


# Waits


def test_a_wait_that_times_out_says_what_it_waited_for_and_what_runs(queue: ClosureQueue) -> None:
    put_new(queue)
    expected = r"Timed out after .* s: join waits for closures; 1 closures wait, running: nothing\."
    with pytest.raises(TimeoutError, match=expected):
        queue.wait_settled(timeout=0.001)


def test_a_stalled_wait_is_reported_without_holding_the_lock() -> None:
    reports: list[str] = []

    def report(text: str) -> None:
        reports.append(text)
        # Each would wait for ever if the lock were held.
        assert queue.statistics().waiting == 1
        if len(reports) > 1:
            queue.cancel(closure)

    queue = new_queue(report)
    closure = put_new(queue)
    queue.wait_settled()
    expected = r"No progress for \d+ s: join waits for closures; 1 closures wait"
    assert len(reports) == 2
    assert all(re.match(expected, text) for text in reports)


@pytest.fixture
def full(stalls: Stalls) -> ClosureQueue:
    """One closure waits, and there is no room for another."""
    queue = new_queue(stalls, capacity=1)
    put_new(queue)
    return queue


@pytest.mark.parametrize("name", ["wait_for_room", "wait_settled"])
def test_a_wait_is_given_up_when_it_is_woken_and_its_condition_holds(
    full: ClosureQueue, stalls: Stalls, name: str
) -> None:
    given_up = threading.Event()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(getattr(full, name), None, given_up.is_set)
        stalls.wait_for("waits for")
        given_up.set()
        full.wake_waits()
        waiting.result(LIMIT)
    assert not full.is_free


def test_room_ends_the_wait_for_it_and_the_deadline_does(full: ClosureQueue, stalls: Stalls) -> None:
    with pytest.raises(TimeoutError, match="schedule waits for room in the full queue"):
        full.wait_for_room(0.001, lambda: False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(full.wait_for_room, LIMIT, lambda: False)
        stalls.wait_for("schedule waits for room")
        take(full)
        waiting.result(LIMIT)
    assert full.is_free


def test_the_pending_error_is_raised_unless_the_wait_was_given_up(full: ClosureQueue) -> None:
    fail(full, take(full), ValueError("mine"))
    assert not full.is_free
    full.wait_for_room(LIMIT, lambda: False)
    full.wait_settled(LIMIT, lambda: True)
    with pytest.raises(ValueError, match="mine"):
        full.wait_settled(LIMIT, lambda: False)
    assert full.is_free
