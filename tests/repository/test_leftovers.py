"""Tests that leftover threads and processes of a test are detected, and replaced ones are not reported."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.leftovers import THREAD_PREFIX, Leftovers

SHORT = 0.2
LONG = 30.0


@contextmanager
def running_thread(name: str) -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(LONG,), name=name)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(LONG)


@contextmanager
def running_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\n", timeout=LONG)


def test_a_thread_left_by_the_library_is_named() -> None:
    leftovers = Leftovers()
    with running_thread(f"{THREAD_PREFIX}-worker-0"):
        assert leftovers.wait_gone(SHORT) == [f"1 x thread {THREAD_PREFIX}-worker-0"]
    assert leftovers.wait_gone(LONG) == []


def test_threads_of_others_are_no_leftovers() -> None:
    leftovers = Leftovers()
    with running_thread("grpc-poller"):
        assert leftovers.wait_gone(SHORT) == []


def test_a_thread_that_replaced_another_is_no_leftover() -> None:
    with running_thread(f"{THREAD_PREFIX}-worker-0"):
        leftovers = Leftovers()
    with running_thread(f"{THREAD_PREFIX}-worker-0"):
        assert leftovers.wait_gone(SHORT) == []


def test_a_process_is_waited_for_and_then_named() -> None:
    leftovers = Leftovers()
    with running_process():
        (left,) = leftovers.wait_gone(SHORT)
        assert "input()" in left
    assert leftovers.wait_gone(LONG) == []


def test_a_process_that_replaced_another_is_no_leftover() -> None:
    with running_process():
        leftovers = Leftovers()
    with running_process():
        assert leftovers.wait_gone(SHORT) == []
