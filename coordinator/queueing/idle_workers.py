"""The workers that wait for a closure, each of which can be woken alone.

    add --> idle --pop, wake--> waking, with an attempt or without --remove--> awake
              \\------------------- wait timed out ----------------remove--/

Guarantees: a closure wakes one worker, however many are idle; and closures for all workers are handed out so that only
a few workers are waking up at a time. The others are woken as these have woken up.

A plain data structure; `ClosureQueue` guards it. Only `IdleWorker.wait` is called without the queue's lock.
"""

import threading
from collections import OrderedDict

from coordinator.queueing.closure import Attempt
from coordinator.queueing.queue_state import QueueState
from coordinator.runtime import Cancellation

# A thread that has woken up and waits for the interpreter's lock asks for it every few milliseconds. Hundreds of them
# cost more than the work that they are woken for.
_MAX_WAKING = 4


class IdleWorker:
    """One wait of one worker.

    Args:
      index: the worker's index.
      cancellation: for the attempt that it will be handed.

    Attributes:
      attempt: the attempt that it was handed; None before, and if it was woken without one.
    """

    __slots__ = ("_asleep", "attempt", "cancellation", "index")

    def __init__(self, index: int, cancellation: Cancellation) -> None:
        self.index = index
        self.cancellation = cancellation
        self.attempt: Attempt | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Waits, on the worker's thread, at most `timeout` seconds; returns whether it was woken."""
        return self._asleep.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))

    def wake(self, attempt: Attempt | None) -> None:
        """Ends the wait. Must be called once."""
        self.attempt = attempt
        self._asleep.release()


class IdleWorkers:
    """The idle workers and those that are waking up.

    Attributes:
      workers: the idle ones by index, in the order in which they became idle.
    """

    def __init__(self) -> None:
        self.workers: OrderedDict[int, IdleWorker] = OrderedDict()
        self._waking = 0

    def add(self, index: int, cancellation: Cancellation) -> IdleWorker:
        """Adds a worker that begins to wait."""
        assert index not in self.workers, f"two threads take for worker {index}"
        self.workers[index] = idle = IdleWorker(index, cancellation)
        return idle

    def remove(self, idle: IdleWorker) -> None:
        """Removes a worker after its wait ended, by being woken or by its timeout."""
        if self.workers.get(idle.index) is idle:
            del self.workers[idle.index]
        else:
            self._waking -= 1

    def pop(self, index: int) -> IdleWorker | None:
        """Removes a worker, which must be woken then; returns None if it is not idle."""
        idle = self.workers.pop(index, None)
        self._waking += idle is not None
        return idle

    def pop_longest(self) -> IdleWorker | None:
        """Removes the worker that has been idle for longest; None if there is none or enough are waking up."""
        if not self.workers or self._waking >= _MAX_WAKING:
            return None
        self._waking += 1
        return self.workers.popitem(last=False)[1]

    def wake_empty(self, index: int) -> None:
        """Wakes a worker without an attempt, if it is idle."""
        idle = self.pop(index)
        if idle is not None:
            idle.wake(None)

    def hand_out(self, state: QueueState, worker: int | None) -> int:
        """Starts closures on idle workers and wakes these.

        Args:
          state: has the closures.
          worker: the worker whose closures to start; None for all workers, as many as may wake up.

        Returns:
          How many runs of closures do not wait any more.
        """
        if worker is not None:
            if not state.may_start(worker) or (idle := self.pop(worker)) is None:
                return 0
            attempt = state.start_next(worker, idle.cancellation)
            idle.wake(attempt)
            return attempt.runs
        count = 0
        while state.waiting.for_all and not state.is_held and (idle := self.pop_longest()):
            attempt = state.start_next(idle.index, idle.cancellation)
            idle.wake(attempt)
            count += attempt.runs
        if state.waiting.apart:
            for index in [each for each in self.workers if state.may_start(each)]:
                if self._waking < _MAX_WAKING and state.may_start(index) and (idle := self.pop(index)):
                    attempt = state.start_next(index, idle.cancellation)
                    idle.wake(attempt)
                    count += attempt.runs
        return count
