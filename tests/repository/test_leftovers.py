"""Tests that leftover threads and processes of a test are detected, and replaced ones are not reported."""

import subprocess
import sys
import threading

from tests.leftovers import THREAD_PREFIX, Leftovers

SHORT = 0.2
LONG = 30.0


def start_thread(name: str) -> tuple[threading.Event, threading.Thread]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(LONG,), name=name)
    thread.start()
    return end, thread


def test_threads_of_the_library_alone_are_named_unless_they_replace_others() -> None:
    name = f"{THREAD_PREFIX}-worker-0"
    end, thread = start_thread(name)
    before = Leftovers()
    end.set()
    thread.join(LONG)
    fresh = Leftovers()
    running = [start_thread(name), start_thread("grpc-poller")]
    assert before.wait_gone(SHORT) == []
    assert fresh.wait_gone(SHORT) == [f"1 x thread {name}"]
    for end, thread in running:
        end.set()
        thread.join(LONG)
    assert fresh.wait_gone(LONG) == []


def test_a_process_is_waited_for_and_then_named() -> None:
    leftovers = Leftovers()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (left,) = leftovers.wait_gone(SHORT)
        assert "input()" in left
        process.communicate(b"\n", timeout=LONG)
    assert leftovers.wait_gone(LONG) == []
