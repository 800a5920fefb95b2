"""Waits that end at a deadline, and say what they wait for."""

import threading
import time

import pytest

from coordinator.watched_wait import WatchedWait


def test_a_wait_ends_at_once_when_it_is_true() -> None:
    condition = threading.Condition()
    with condition:
        WatchedWait(60, pytest.fail, int, str).until(condition, lambda: True, "anything", None)


def test_a_wait_that_comes_to_its_deadline_says_for_what_and_against_what() -> None:
    condition = threading.Condition()
    wait = WatchedWait(60, pytest.fail, int, lambda: "two in the way")
    with condition, pytest.raises(TimeoutError, match=r"Timed out after .* s: the end; two in the way\."):
        wait.until(condition, lambda: False, "the end", time.monotonic() + 0.01)


def test_a_wait_without_progress_is_reported_without_the_lock() -> None:
    condition = threading.Condition(threading.Lock())
    reports: list[str] = []

    def report(text: str) -> None:
        with condition:  # would wait for ever if the lock were held
            reports.append(text)

    with condition:
        WatchedWait(0.01, report, int, lambda: "nothing moves").until(condition, lambda: len(reports) > 1, "two", None)
    assert all(report.startswith("No progress for 0 s: two; nothing moves") for report in reports)


def test_a_wait_with_progress_is_not_reported() -> None:
    condition = threading.Condition()
    looks: list[int] = []

    def progress() -> int:
        looks.append(len(looks))
        return looks[-1]

    with condition:
        WatchedWait(0.01, pytest.fail, progress, str).until(condition, lambda: len(looks) > 8, "some looks", None)
