"""Tests of Ctrl-C in the main thread, on workers in memory: wherever it comes, the strategy stays usable."""

import dataclasses
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from coordinator.queueing.waits import uninterrupted
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests import ROOT
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, hold, index_of, running_scheduler

WORKERS = 2
CAPACITY = 8
PACKAGE = str(ROOT / "coordinator")


Prepare = Callable[[Scheduler, Gate], Any]


WAITING = ("coordinator/queueing/closure_queue.py", "coordinator/future.py")


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def is_interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Makes a call, with Ctrl-C when a function in it begins or returns for the `number`-th time.

    These are the moments at which Python looks for signals. Returns False if there are fewer.
    """
    events = itertools.count(1)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        # Not in Python's own modules: a condition may release its lock twice there, for some nanoseconds of a wait.
        is_looking = event != "c_call" and frame.f_code.co_filename.startswith(PACKAGE)
        if is_looking and next(events) == number:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def schedule_for_idle_workers(scheduler: Scheduler, gate: Gate) -> object:
    wait_until(lambda: len(scheduler.queue.idle_workers()) == WORKERS)
    return lambda: scheduler.schedule(gate, "step")


def schedule_for_busy_workers(scheduler: Scheduler, gate: Gate) -> object:
    hold(scheduler, WORKERS)
    return lambda: scheduler.schedule(gate, "step")


def schedule_with_an_argument(scheduler: Scheduler, gate: Gate) -> object:
    needed = scheduler.schedule(index_of, "argument")
    needed.result(LIMIT)
    return lambda: scheduler.schedule(gate, "step", after=[needed])


def cancel(scheduler: Scheduler, gate: Gate) -> object:
    schedule_for_busy_workers(scheduler, gate)
    return scheduler.schedule(gate, "step").cancel


def cancel_all(scheduler: Scheduler, gate: Gate) -> object:
    schedule_for_busy_workers(scheduler, gate)
    for worker in (None, 0):
        scheduler.schedule(gate, "step", worker=worker)
    return lambda: scheduler.queue.cancel_all(timeout=0)


def interrupted_calls(scheduler: Scheduler, runtime: FakeRuntime, prepare: Prepare) -> Iterator[Gate]:
    """Makes a call again and again, interrupted one moment later each time and not at all the last time.

    Yields after each call the gate at which the closures are that it has scheduled.
    """
    for number in itertools.count(1):
        gate = Gate(runtime)
        was_interrupted = is_interrupted_at(number, prepare(scheduler, gate))
        yield gate
        if not was_interrupted:
            break
    assert number > 3


@pytest.mark.parametrize(
    "prepare",
    [schedule_for_idle_workers, schedule_for_busy_workers, schedule_with_an_argument, cancel, cancel_all],
    ids=lambda function: function.__name__,
)
def test_ctrl_c_may_come_at_any_moment_of_a_call(prepare: Prepare) -> None:
    runtime = FakeRuntime(WORKERS)
    with running_scheduler(runtime) as scheduler:
        for _ in interrupted_calls(scheduler, runtime, prepare):
            scheduler.cancel_all()
            futures = [scheduler.schedule(index_of, "after", worker=worker) for worker in range(WORKERS)]
            futures.append(scheduler.schedule(index_of, "after"))
            scheduler.join(LIMIT)
            assert all(future.exception(0) is None for future in futures)
            statistics = scheduler.cluster.statistics()
            assert (statistics.waiting, statistics.running) == (0, 0)
        # Each worker is still woken when there is something for it.
        wait_until(lambda: len(scheduler.queue.idle_workers()) == WORKERS)


WAITS: dict[str, Callable[[Scheduler, Gate], object]] = {
    "join": lambda scheduler, _: scheduler.join(LIMIT),
    "join without a limit": lambda scheduler, _: scheduler.join(),
    "schedule": lambda scheduler, gate: [scheduler.schedule(gate, "step") for _ in range(CAPACITY)],
    "result": lambda scheduler, gate: scheduler.schedule(gate, "step").result(),
    "exception": lambda scheduler, gate: scheduler.schedule(gate, "step").exception(LIMIT),
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_alone_and_cancel_all_what_was_waited_for(wait: str) -> None:
    runtime = FakeRuntime(WORKERS)
    options = dataclasses.replace(OPTIONS, max_queued_closures=CAPACITY)
    with running_scheduler(runtime, options) as scheduler, ThreadPoolExecutor() as pool:
        gate, futures = hold(scheduler, WORKERS + 2)
        interrupting = pool.submit(signal_main_thread_in_a_wait)
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](scheduler, gate)
        interrupting.result(LIMIT)
        assert not any(future.done() for future in futures)
        if wait == "join":
            # They continue, and another join waits for them.
            gate.open()
            scheduler.join(LIMIT)
            assert all(future.exception(0) is None for future in futures)
        else:
            scheduler.cancel_all()
            assert all(future.cancelled() for future in futures)
        after = scheduler.schedule(index_of, "after")
        scheduler.join(LIMIT)
        assert after.result(0) in range(WORKERS)


def signal_main_thread_in_a_wait() -> None:
    """Sends the signal of Ctrl-C once the main thread waits in a condition of the library."""
    main = threading.main_thread().ident
    assert main is not None

    def is_waiting() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[main])  # noqa: SLF001 - a documented function
        return stack[-1].name == "wait" and any(frame.filename.endswith(WAITING) for frame in stack)

    wait_until(is_waiting)
    os.kill(os.getpid(), signal.SIGINT)


def test_one_ctrl_c_waits_for_the_end_of_an_uninterrupted_function_and_two_do_not() -> None:
    steps: list[str] = []

    @uninterrupted
    def change(count: int) -> None:
        for _ in range(count):
            signal.raise_signal(signal.SIGINT)
        steps.append(f"after {count}")

    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            change(count)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert steps == ["after 1"]
