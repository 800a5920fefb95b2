"""The workers that wait for a closure, each where it can be woken alone.

    add --> idle --pop, wake--> waking, with an attempt or nothing --leave--> up
              \\--------------- has waited long enough -------leave--/

Promises: however many are idle, a closure wakes one of them; and of those that any worker may run, so many are given
out that only a few workers are waking at a time. The others follow as these get up.

A plain data structure; `ClosureQueue` guards it. `IdleWorker.wait` alone is called without the queue's lock.
"""

import threading
from collections import OrderedDict

from coordinator.queueing.closure import Attempt
from coordinator.runtime import Cancellation

# A thread that is awake and waits for its turn in the interpreter looks every few milliseconds whether it has come.
# Hundreds that do so cost more than all that the threads are for.
_MOST_WAKING = 4


class IdleWorker:
    """One worker that waits once.

    Args:
      index: the worker's.
      cancellation: for the attempt that it will be handed.

    Attributes:
      attempt: what it was handed; None before, and if it was sent away.
    """

    __slots__ = ("_asleep", "attempt", "cancellation", "index")

    def __init__(self, index: int, cancellation: Cancellation) -> None:
        self.index = index
        self.cancellation = cancellation
        self.attempt: Attempt | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Waits, on the worker's thread, at most `timeout` seconds; whether it was woken."""
        return self._asleep.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))

    def wake(self, attempt: Attempt | None) -> None:
        """Ends the wait; to be called once."""
        self.attempt = attempt
        self._asleep.release()


class IdleWorkers:
    """Idle workers, in the order in which they became so, and those that are waking."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, IdleWorker] = OrderedDict()
        self._waking = 0

    def add(self, index: int, cancellation: Cancellation) -> IdleWorker:
        """A worker begins to wait."""
        assert index not in self._idle, f"two threads take for worker {index}"
        self._idle[index] = idle = IdleWorker(index, cancellation)
        return idle

    def leave(self, idle: IdleWorker) -> None:
        """It is up: it was woken, or waits no more of its own accord."""
        if self._idle.get(idle.index) is idle:
            del self._idle[idle.index]
        else:
            self._waking -= 1

    def pop(self, index: int) -> IdleWorker | None:
        """Takes out a worker, which must be woken then; None if it is not idle."""
        idle = self._idle.pop(index, None)
        self._waking += idle is not None
        return idle

    def pop_longest(self) -> IdleWorker | None:
        """Takes out the one that has been idle for longest, if there is one and no more are waking than should."""
        if not self._idle or self._waking >= _MOST_WAKING:
            return None
        self._waking += 1
        return self._idle.popitem(last=False)[1]

    def send_away(self, index: int) -> None:
        """Wakes a worker, if it is idle, with nothing."""
        idle = self.pop(index)
        if idle is not None:
            idle.wake(None)

    def indices(self) -> list[int]:
        """Who is idle, longest first."""
        return list(self._idle)
