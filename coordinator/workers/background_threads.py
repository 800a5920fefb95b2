"""The library's background threads, but for the workers' and the recovery's: each has a name, `start` and `stop`."""

import dataclasses
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Servers

_logger = logging.getLogger("coordinator")


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
            for worker in self._queue.idle_workers():
                if not self._servers.seems_reachable(worker):
                    self._queue.interrupt(worker)


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
            following = self._queue.requeue_overdue()
            if following is not None:
                self._wake_at(following)


@dataclasses.dataclass(frozen=True)
class MembershipChange:
    """How to get from the workers that there are to those that are wanted.

    Attributes:
      moved: the new address of each worker that moved, by index.
      removed: the indices of workers that are to be removed.
      added: the addresses of new workers.
    """

    moved: Mapping[int, str]
    removed: Sequence[int]
    added: Sequence[str]


def change_between(present: Mapping[int, str], lost: Collection[int], wanted: Collection[str]) -> MembershipChange:
    """Compares the workers that there are with those that are wanted.

    A lost worker whose address is not wanted any more is taken to have moved to a new address, if there is one.

    Args:
      present: the address of each worker, by index.
      lost: the indices of those that do not answer.
      wanted: the addresses at which workers are wanted.
    """
    added = [address for address in dict.fromkeys(wanted) if address not in present.values()]
    gone = [index for index, address in sorted(present.items()) if address not in wanted]
    lost_and_gone = [index for index in gone if index in lost]
    moved = dict(zip(lost_and_gone, added, strict=False))
    return MembershipChange(moved, [index for index in gone if index not in moved], added[len(moved) :])


class MembershipWatch(BackgroundThread):
    """Asks for the workers' addresses at intervals, and has changes applied while training runs.

    Addresses that cannot be read or applied change nothing, and are reported once.

    Args:
      addresses: returns the addresses at which workers are wanted; called on the thread of this class.
      interval: between two calls, in seconds.
      apply: adds, moves and removes workers so that they have these addresses.
    """

    def __init__(
        self, addresses: Callable[[], Collection[str]], interval: float, apply: Callable[[Collection[str]], None]
    ) -> None:
        super().__init__("coordinator-membership")
        self._addresses = addresses
        self._interval = interval
        self._apply = apply

    def _run(self) -> None:
        last_reason = ""
        while not self._stop.wait(self._interval):
            try:
                self._apply(self._addresses())
                last_reason = ""
            except Exception as error:  # noqa: BLE001 - it comes from the user's own source of addresses
                reason = f"{type(error).__name__}: {error}"
                if reason != last_reason and not self._stop.is_set():
                    last_reason = reason
                    _logger.warning("The workers stay as they are: the cluster's description is invalid. %s", reason)
