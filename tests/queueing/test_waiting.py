"""Tests of waits that end at a deadline, and report what they wait for."""

import threading
import time

import pytest

from coordinator.future import Future
from coordinator.queueing.closure import Closure
from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.waiting import QueueWaits


@pytest.fixture
def lock() -> threading.Lock:
    return threading.Lock()


@pytest.fixture
def state() -> QueueState:
    """One closure waits."""
    state = QueueState()
    state.add(Closure(None, "step", 0, Future("step", 0)))
    return state


def test_a_wait_ends_at_once_when_its_condition_holds(lock: threading.Lock) -> None:
    with lock:
        QueueWaits(lock, QueueState(), pytest.fail, 60).wait_settled(None)


def test_a_wait_that_times_out_says_what_it_waited_for_and_what_runs(lock: threading.Lock, state: QueueState) -> None:
    waits = QueueWaits(lock, state, pytest.fail, 60)
    expected = r"Timed out after .* s: join waits for closures; 1 closures wait, running: nothing\."
    with lock, pytest.raises(TimeoutError, match=expected):
        waits.wait_settled(time.monotonic() + 0.01)


def test_a_stalled_wait_is_reported_without_holding_the_lock(lock: threading.Lock, state: QueueState) -> None:
    reports: list[str] = []

    def report(text: str) -> None:
        with lock:  # would wait for ever if the lock were held
            reports.append(text)
            state.unsettled = 0 if len(reports) > 1 else 1

    with lock:
        QueueWaits(lock, state, report, 0.01).wait_settled(None)
    assert all(text.startswith("No progress for 0 s: join waits for closures; 1 closures wait") for text in reports)


def test_a_wait_with_progress_is_not_reported(lock: threading.Lock) -> None:
    class Progressing(QueueState):
        """Makes progress whenever its progress is read, and settles in the end."""

        reads = 0

        @property
        def progress(self) -> tuple[int, ...]:
            self.reads += 1
            self.unsettled = int(self.reads <= 8)
            return (self.reads,)

    state = Progressing()
    state.unsettled = 1
    with lock:
        QueueWaits(lock, state, pytest.fail, 0.01).wait_settled(None)
    assert state.reads > 8
