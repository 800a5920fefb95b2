"""The threads that watch closures and workers, and what they have in common with the workers' own threads."""

import math
import threading
import time
from collections.abc import Callable

from coordinator.background_thread import BackgroundThread
from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Servers


class QueueThread(BackgroundThread):
    """A background thread of one strategy, whose unexpected errors are events `thread_failed`.

    Args:
      name: of the thread.
      run: see `BackgroundThread`.
      queue: in whose events the errors are recorded.
    """

    def __init__(self, name: str, run: Callable[[], object], queue: ClosureQueue) -> None:
        super().__init__(name, run, self._record_failure)
        self._queue = queue

    def _record_failure(self, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._queue.events.record("thread_failed", name=self.thread.name, detail=detail)


class IdleWatch(QueueThread):
    """Wakes the idle workers whose servers seem to be lost, so that no other idle worker has to wake up to look.

    Args:
      servers: know by heartbeat which servers answer.
      queue: knows which workers are idle.
      interval: between two looks, in seconds.
    """

    def __init__(self, servers: Servers, queue: ClosureQueue, interval: float) -> None:
        super().__init__("coordinator-idle-workers", self._watch, queue)
        self._servers = servers
        self._interval = interval

    def _watch(self) -> None:
        while not self.stopping.wait(self._interval):
            for worker in self._queue.workers.idle():
                if not self._servers.seems_reachable(worker):
                    self._queue.workers.interrupt(worker)


class StragglerWatch(QueueThread):
    """Has closures that exceed their timeout tried on another worker as well. Sleeps until the earliest deadline.

    Args:
      queue: has the closures that run.
    """

    def __init__(self, queue: ClosureQueue) -> None:
        super().__init__("coordinator-stragglers", self._watch, queue)
        self._changed = threading.Condition()
        self._deadline = math.inf

    def track(self, attempt: Attempt) -> None:
        """Tracks an attempt that has started, if its closure has a timeout."""
        if attempt.closure.timeout is not None:
            self._wake_at(attempt.started + attempt.closure.timeout)

    def stop(self) -> None:
        """Asks the thread to end."""
        super().stop()
        self._wake_at(-math.inf)

    def _wake_at(self, deadline: float) -> None:
        with self._changed:
            if deadline < self._deadline:
                self._deadline = deadline
                self._changed.notify()

    def _watch(self) -> None:
        # After an error the deadline is not known any more.
        self._wake_at(time.monotonic())
        while not self.stopping.is_set():
            with self._changed:
                while (remaining := self._deadline - time.monotonic()) > 0:
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                self._deadline = math.inf
            following = self._queue.workers.requeue_overdue()
            if following is not None:
                self._wake_at(following)
