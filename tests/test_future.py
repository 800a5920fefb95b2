"""Tests of the future of one closure, without a queue."""

import concurrent.futures
import logging
import threading

import pytest

from coordinator.future import Future


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


def test_a_future_that_is_done_cannot_be_cancelled(future: Future, withdrawals: Withdrawals) -> None:
    future.set_result(3)
    assert not future.cancel()
    assert withdrawals.count == 0
    assert future.result(0) == 3


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


def test_callbacks_get_the_future_in_order_also_when_it_is_done(future: Future) -> None:
    calls: list[tuple[str, object]] = []
    future.add_done_callback(lambda done: calls.append(("first", done)))
    future.add_done_callback(lambda done: calls.append(("second", done)))
    future.set_result(1)
    future.add_done_callback(lambda done: calls.append(("late", done)))
    assert calls == [("first", future), ("second", future), ("late", future)]


@pytest.mark.parametrize("raised", [ValueError("of a callback"), SystemExit(1)])
def test_an_error_in_a_callback_is_logged_and_not_raised(
    future: Future, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    def fail(_: object) -> None:
        raise raised

    called: list[object] = []
    future.add_done_callback(fail)
    future.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR, logger="concurrent.futures"):
        future.set_result(1)
    assert called == [future]
    assert type(raised).__name__ in caplog.text
