"""Tests of a future's lazily created condition: with `concurrent.futures` and many threads no notification is lost."""

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.future import Future
from tests.deadline import LIMIT, wait_until

FUTURES = 60


def new_future(number: int = 0) -> Future:
    return Future("step", number, on_cancel=lambda: False)


def result(future: Future) -> None:
    future.set_result(future)


def error(future: Future) -> None:
    future.set_exception(ValueError())


def cancellation(future: Future) -> None:
    future.set_cancelled()


def test_the_base_class_has_exactly_the_attributes_that_are_created_lazily() -> None:
    attributes = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
    assert set(vars(concurrent.futures.Future())) == attributes


@pytest.mark.parametrize("set_outcome", [result, error, cancellation])
@pytest.mark.parametrize("is_watched", [False, True])
def test_an_outcome_is_never_replaced(set_outcome: Callable[[Future], None], is_watched: bool) -> None:
    future = new_future()
    if is_watched:
        future.add_done_callback(lambda _: None)
    set_outcome(future)
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_result("another")
    assert future.done()


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


@pytest.mark.parametrize("repeat", range(4))
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


@pytest.mark.parametrize("set_outcome", [result, error, cancellation])
def test_no_outcome_is_set_while_a_condition_is_created(set_outcome: Callable[[Future], None]) -> None:
    future = new_future()
    with ThreadPoolExecutor() as pool:
        with Future._conditions_lock:
            setting = pool.submit(set_outcome, future)
            assert not concurrent.futures.wait([setting], timeout=0.05).done
            assert not future.done()
        setting.result(LIMIT)
    assert future.done()
