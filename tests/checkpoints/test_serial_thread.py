"""Tests of the thread on which checkpoints are written."""

import threading

import pytest

from coordinator.checkpoints.checkpoints import SerialThread
from tests.deadline import LIMIT


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_calls_are_made_after_one_that_raised_anything(error: type[BaseException]) -> None:
    thread, made = SerialThread("coordinator-test", "A test"), threading.Event()

    def fail() -> None:
        raise error

    thread.submit(fail)
    thread.submit(made.set)
    assert thread.wait(LIMIT)
    assert made.is_set()
