"""Background threads: the base of all, with a name, `start` and `stop`; and those that watch closures and workers."""

import math
import threading
import time
from abc import ABC, abstractmethod

from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Servers


class BackgroundThread(ABC):
    """An object with a thread that runs until it is stopped.

    Args:
      name: the thread's name.

    Attributes:
      thread: the thread.
    """

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stop.set()

    def wait_stopped(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread to end; returns whether it did."""
        self.thread.join(timeout)
        return not self.thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Runs on the thread, until `_stop` is set."""


class IdleWatch(BackgroundThread):
    """Wakes the idle workers whose servers seem to be lost, so that no other idle worker has to wake up to look.

    Args:
      servers: know by heartbeat which servers answer.
      queue: knows which workers are idle.
      interval: between two looks, in seconds.
    """

    def __init__(self, servers: Servers, queue: ClosureQueue, interval: float) -> None:
        super().__init__("coordinator-idle-workers")
        self._servers = servers
        self._queue = queue
        self._interval = interval

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            for worker in self._queue.workers.idle():
                if not self._servers.seems_reachable(worker):
                    self._queue.workers.interrupt(worker)


class StragglerWatch(BackgroundThread):
    """Has closures that exceed their timeout tried on another worker as well. Sleeps until the earliest deadline.

    Args:
      queue: has the closures that run.
    """

    def __init__(self, queue: ClosureQueue) -> None:
        super().__init__("coordinator-stragglers")
        self._queue = queue
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

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                while (remaining := self._deadline - time.monotonic()) > 0:
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                self._deadline = math.inf
            following = self._queue.workers.requeue_overdue()
            if following is not None:
                self._wake_at(following)
