"""Tests of the future of one closure, without a queue: also with `concurrent.futures` and many threads."""

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.future import Future
from tests.deadline import LIMIT, wait_until


class Withdrawals:
    """Replaces the queue, which withdraws a closure that has no outcome yet."""

    def __init__(self) -> None:
        self.count = 0
        self.future: Future | None = None

    def __call__(self) -> bool:
        self.count += 1
        assert self.future is not None
        self.future.set_cancelled()
        return True


@pytest.fixture
def withdrawals() -> Withdrawals:
    return Withdrawals()


@pytest.fixture
def future(withdrawals: Withdrawals) -> Future:
    withdrawals.future = Future("step", 7, on_cancel=withdrawals)
    return withdrawals.future


@pytest.mark.parametrize("runs", [False, True])
def test_a_future_without_an_outcome_can_be_cancelled(future: Future, withdrawals: Withdrawals, runs: bool) -> None:
    future.is_started = runs
    assert future.running() is runs
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future.cancel()
    assert future.cancelled()
    assert not future.running()
    assert future.cancel(), "it is still cancelled"
    assert withdrawals.count == 1
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)


def test_wait_and_as_completed_work_with_results_errors_and_cancellations(withdrawals: Withdrawals) -> None:
    good, bad, cancelled, pending = futures = [Future("step", number, withdrawals) for number in range(4)]
    good.set_result(1)
    bad.set_exception(ValueError("wrong"))
    cancelled.set_cancelled()
    done, not_done = concurrent.futures.wait(futures, timeout=0)
    assert (done, not_done) == ({good, bad, cancelled}, {pending})
    first = concurrent.futures.wait(futures, timeout=30, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert bad in first.done
    setting = threading.Thread(target=pending.set_result, args=(4,))
    setting.start()
    assert set(concurrent.futures.as_completed(futures, timeout=30)) == set(futures)
    setting.join()


@pytest.mark.parametrize("raised", [ValueError("of a callback"), SystemExit(1)])
def test_callbacks_get_the_future_in_order_also_when_one_raises_or_it_is_done(
    future: Future, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    def fail(_: object) -> None:
        calls.append(("fails", future))
        raise raised

    calls: list[tuple[str, object]] = []
    future.add_done_callback(fail)
    future.add_done_callback(lambda done: calls.append(("second", done)))
    future.set_result(1)
    future.add_done_callback(lambda done: calls.append(("late", done)))
    assert calls == [("fails", future), ("second", future), ("late", future)]
    assert type(raised).__name__ in caplog.text


FUTURES = 60


def new_future(number: int = 0) -> Future:
    return Future("step", number, on_cancel=lambda: False)


def result(future: Future) -> None:
    future.set_result(future)


OUTCOMES = [result, lambda future: future.set_exception(ValueError()), Future.set_cancelled]


def test_the_base_class_has_exactly_the_attributes_that_are_created_lazily() -> None:
    attributes = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
    assert set(vars(concurrent.futures.Future())) == attributes


@pytest.mark.parametrize("set_outcome", OUTCOMES)
@pytest.mark.parametrize("is_watched", [False, True])
def test_an_outcome_is_never_replaced(set_outcome: Callable[[Future], None], is_watched: bool) -> None:
    future = new_future()
    if is_watched:
        future.add_done_callback(lambda _: None)
    set_outcome(future)
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_result("another")
    assert future.done()
    assert future.cancel() is (set_outcome is Future.set_cancelled)


def by_result(futures: list[Future], seen: Counter[Future]) -> None:
    for future in futures:
        assert future.result(LIMIT) is future
        seen[future] += 1


def by_wait(futures: list[Future], seen: Counter[Future]) -> None:
    done, not_done = concurrent.futures.wait(futures, timeout=LIMIT)
    assert not not_done
    assert all(future.done() for future in done)
    seen.update(done)


def by_as_completed(futures: list[Future], seen: Counter[Future]) -> None:
    for future in concurrent.futures.as_completed(futures, LIMIT):
        seen[future] += 1


def by_callback(futures: list[Future], seen: Counter[Future]) -> None:
    called: list[Future] = []
    for future in futures:
        future.add_done_callback(called.append)
    wait_until(lambda: len(called) == len(futures))
    seen.update(called)


WAYS = [by_result, by_wait, by_as_completed, by_callback]


@pytest.mark.parametrize("repeat", range(2))
@pytest.mark.usefixtures("frequent_thread_switches")
def test_every_kind_of_waiter_is_notified_once_per_future(repeat: int) -> None:
    futures = [new_future(number) for number in range(FUTURES)]
    halves = futures[: FUTURES // 2], futures[FUTURES // 2 :]
    counts = [Counter[Future]() for _ in range(len(WAYS) * 2)]
    barrier = threading.Barrier(len(counts) + len(halves), timeout=LIMIT)

    def watch(way: Callable[[list[Future], Counter[Future]], None], seen: Counter[Future]) -> None:
        barrier.wait()
        way(futures, seen)

    def finish(part: list[Future]) -> None:
        barrier.wait()
        for future in part:
            result(future)

    with ThreadPoolExecutor(len(counts) + len(halves)) as pool:
        running = [pool.submit(watch, way, seen) for way, seen in zip(WAYS * 2, counts, strict=True)]
        running += [pool.submit(finish, part) for part in halves]
        for thread in running:
            thread.result(2 * LIMIT)
    for seen in counts:
        assert seen == dict.fromkeys(futures, 1)


@pytest.mark.parametrize("set_outcome", OUTCOMES)
def test_no_outcome_is_set_while_a_condition_is_created(set_outcome: Callable[[Future], None]) -> None:
    future = new_future()
    with ThreadPoolExecutor() as pool:
        with Future._conditions_lock:
            setting = pool.submit(set_outcome, future)
            assert not concurrent.futures.wait([setting], timeout=0.05).done
            assert not future.done()
        setting.result(LIMIT)
    assert future.done()
