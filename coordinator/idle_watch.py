"""Sees to it that the loss of an idle worker is noticed, without waking the others to ask each.

The worker itself is woken to find out, and to wait for its task's return. The thread ends with `stop`.
"""

from coordinator.background_thread import BackgroundThread
from coordinator.closure_queue import ClosureQueue
from coordinator.runtime import Runtime


class IdleWatch(BackgroundThread):
    """Wakes those idle workers that seem to be lost.

    Args:
      runtime: has heard of losses.
      queue: in which workers are idle.
      interval: how often it looks, in seconds.
    """

    def __init__(self, runtime: Runtime, queue: ClosureQueue, interval: float) -> None:
        super().__init__("coordinator-idle-workers")
        self._runtime = runtime
        self._queue = queue
        self._interval = interval

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            for worker in self._queue.idle_workers():
                if not self._runtime.seems_reachable(worker):
                    self._queue.rouse(worker)
