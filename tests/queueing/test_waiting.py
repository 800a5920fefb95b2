"""Tests of waits that end at a deadline, and report what they wait for."""

import re
import threading
from collections.abc import Callable

import pytest

from coordinator.future import Future
from coordinator.queueing.closure import Closure, ErrorScope
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.testing import FakeRuntime

TIMEOUT = 30.0


def new_queue(
    stall_interval: float, report_stall: Callable[[str], None] = pytest.fail, capacity: int = 100
) -> ClosureQueue:
    return ClosureQueue(capacity, FakeRuntime().new_cancellation, report_stall, stall_interval)


def test_a_wait_that_times_out_says_what_it_waited_for_and_what_runs() -> None:
    queue = new_queue(60)
    queue.put(new_closure())
    expected = r"Timed out after .* s: join waits for closures; 1 closures wait, running: nothing\."
    with pytest.raises(TimeoutError, match=expected):
        queue.wait_settled(timeout=0.01)


def test_a_stalled_wait_is_reported_without_holding_the_lock() -> None:
    reports: list[str] = []
    closure = new_closure()

    def report(text: str) -> None:
        reports.append(text)
        # Each would wait for ever if the lock were held.
        assert queue.statistics().waiting == 1
        if len(reports) > 1:
            queue.cancel(closure)

    queue = new_queue(0.01, report)
    queue.put(closure)
    queue.wait_settled()
    expected = r"No progress for \d+ s: join waits for closures; 1 closures wait"
    assert len(reports) == 2
    assert all(re.match(expected, text) for text in reports)


# Waits that are given up when their user does not wait any more.


@pytest.fixture
def queue() -> ClosureQueue:
    """One closure waits, and there is no room for another."""
    queue = new_queue(60, capacity=1)
    queue.put(new_closure())
    return queue


def new_closure() -> Closure:
    return Closure(None, "step", 0, Future("step", 0))


def waiting(wait: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - compared by the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("name", ["wait_for_room", "wait_settled"])
def test_a_wait_is_given_up_when_it_is_woken_and_its_condition_holds(queue: ClosureQueue, name: str) -> None:
    given_up = threading.Event()
    thread, errors = waiting(lambda: getattr(queue, name)(None, given_up.is_set))
    given_up.set()
    queue.wake_waits()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert not errors
    assert not queue.is_free


def test_room_ends_the_wait_for_it_and_the_deadline_does(queue: ClosureQueue) -> None:
    with pytest.raises(TimeoutError, match="schedule waits for room in the full queue"):
        queue.wait_for_room(0.01, lambda: False)
    thread, errors = waiting(lambda: queue.wait_for_room(TIMEOUT, lambda: False))
    assert queue.take(0, TIMEOUT) is not None
    thread.join(TIMEOUT)
    assert not errors
    assert queue.is_free
    queue.put(new_closure())


def test_the_pending_error_is_raised_unless_the_wait_was_given_up(queue: ClosureQueue) -> None:
    attempt = queue.take(0, TIMEOUT)
    assert attempt is not None
    queue.fail(attempt, ValueError("mine"), ErrorScope.ALL_CLOSURES)
    assert not queue.is_free
    queue.wait_for_room(TIMEOUT, lambda: False)
    queue.wait_settled(TIMEOUT, lambda: True)
    with pytest.raises(ValueError, match="mine"):
        queue.wait_settled(TIMEOUT, lambda: False)
    assert queue.is_free
