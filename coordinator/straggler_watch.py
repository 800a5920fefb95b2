"""Sees to it that closures which take too long are tried on another worker as well.

Promise: it does nothing at all before a closure with a time limit was scheduled. The thread ends with `stop`.
"""

import math
import threading

from coordinator.background_thread import BackgroundThread
from coordinator.closure_queue import ClosureQueue

# A closure is found to have overrun at most this part of its limit too late.
_TICKS_PER_TIMEOUT = 4
_SHORTEST_TICK = 0.005


class StragglerWatch(BackgroundThread):
    """Looks for overrun closures in the queue, as often as the shortest time limit asks for.

    Args:
      queue: has the closures that run.
    """

    def __init__(self, queue: ClosureQueue) -> None:
        super().__init__("coordinator-stragglers")
        self._queue = queue
        self._is_needed = threading.Event()
        self._shortest = math.inf

    def heed(self, timeout: float) -> None:
        """A closure with this time limit, in seconds, was scheduled."""
        self._shortest = min(self._shortest, timeout)
        self._is_needed.set()

    def stop(self) -> None:
        """Asks the thread to end."""
        super().stop()
        self._is_needed.set()

    def _run(self) -> None:
        self._is_needed.wait()
        while not self._stop.wait(max(_SHORTEST_TICK, self._shortest / _TICKS_PER_TIMEOUT)):
            self._queue.try_overrun_elsewhere()
