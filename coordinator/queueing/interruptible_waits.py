"""Waits for the queue that are given up when their user does not wait any more.

A thread of the library makes them in place of the user's thread, which runs a function of TensorFlow meanwhile.
"""

import threading
import time
from collections.abc import Callable

from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.waiting import QueueWaits


class InterruptibleWaits:
    """Waits that end early when a condition of the caller becomes true, after `wake`.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      waits: how threads wait for it.
      capacity: the number of closures that may wait.
    """

    def __init__(self, lock: threading.Lock, state: QueueState, waits: QueueWaits, capacity: int) -> None:
        self._lock = lock
        self._state = state
        self._waits = waits
        self._capacity = capacity

    @property
    def is_free(self) -> bool:
        """Whether `put` would not wait now, and `wait_settled` would not raise."""
        return self._state.error is None and self._state.waiting.count < self._capacity

    def wait_for_room(self, timeout: float | None, unless: Callable[[], bool]) -> None:
        """Waits until `put` would not wait; raises TimeoutError."""
        with self._lock:
            self._waits.wait_room_or_error(
                self._capacity, None if timeout is None else time.monotonic() + timeout, unless
            )

    def wait_settled(self, timeout: float | None, unless: Callable[[], bool]) -> None:
        """Does what `ClosureQueue.wait_settled` does; raises no pending error once `unless()` is true."""
        with self._lock:
            self._waits.wait_settled(None if timeout is None else time.monotonic() + timeout, unless)

    def wake(self) -> None:
        """Has each wait look at its condition."""
        with self._lock:
            self._waits.notify_all()
