"""A closure queue without workers and runtime: the test calls it as both would."""

import threading
from collections.abc import Callable
from typing import Any

from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.future import Future
from coordinator.queueing.closure import Attempt, Closure, ErrorScope
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.testing.fake_runtime import FakeCancellation
from tests.deadline import LIMIT


class Stalls:
    """Receives the stall reports of a queue, by which a test knows that a thread waits inside it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._reported = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._reported:
            self.texts.append(text)
            self._reported.notify_all()

    def wait_for(self, *words: str) -> None:
        """Waits for a report that has each of these words."""
        with self._reported:
            found = self._reported.wait_for(lambda: any(all(w in text for w in words) for text in self.texts), LIMIT)
        assert found, self.texts


def new_queue(stalls: Callable[[str], None], capacity: int = 100, clock: Clock = SYSTEM_CLOCK) -> ClosureQueue:
    return ClosureQueue(capacity, lambda: FakeCancellation(threading.Condition()), stalls, 0.01, clock)


def new_closure(queue: ClosureQueue, number: int = 0, *, work: object = None, **settings: Any) -> Closure:
    future = Future("step", number, on_cancel=lambda: queue.cancel(closure))
    closure = Closure(work, "step", number, future, **settings)
    return closure


def new_internal(queue: ClosureQueue, number: int = 0, *, target: int) -> Closure:
    return new_closure(queue, number, target=target, is_internal=True)


def put_new(queue: ClosureQueue, number: int = 0, **settings: Any) -> Closure:
    closure = new_closure(queue, number, **settings)
    queue.put(closure, timeout=LIMIT)
    return closure


def take(queue: ClosureQueue, worker: int = 0) -> Attempt:
    attempt = queue.take(worker, LIMIT)
    assert attempt is not None
    return attempt


def fail(
    queue: ClosureQueue, attempt: Attempt, error: BaseException, scope: ErrorScope = ErrorScope.ALL_CLOSURES
) -> None:
    queue.fail(attempt, error, scope)
