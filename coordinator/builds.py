"""Building of functions in the background, and preparing of them on workers, so that no closure waits for either.

A call of several steps has to be traced and registered on the client, and prepared on each worker that runs it, which
takes from tenths of a second to many seconds. No worker does so with closures in hand:

    a worker's thread      4 steps would pay --request--> builder's thread: traces and registers them, once for all
    the same, without      prepares them on the worker <------------------------'
    a closure in hand      uses them from then on

    worker 0   1 1 1 1 1 1 [4 prepared] 4 4 4 4 4 4 4
    worker 1   1 1 1 1 1 1  1  1  1  1 [4 prepared] 4

Guarantees: nothing waits for a build; at most a quarter of the workers, but at least one, prepare something at a time,
so that the others go on. What a worker prepares is an internal closure: `join` does not wait for it, and it ends as one
does when the worker is lost or the strategy is closed.
"""

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from coordinator.future import Future


class Preparation(NamedTuple):
    """What is to be prepared on a worker.

    Attributes:
      worker: the worker's index.
      work: prepares it; what the runtime runs.
      name: for messages.
      on_end: called once it has been prepared, or will not be: the work failed, or the worker is lost.
    """

    worker: int
    work: Any
    name: str
    on_end: Callable[[], object] = lambda: None


class Builds:
    """What is built and prepared for the workers of one strategy. Any thread may use it.

    Attributes:
      workers: the number of workers, set by the cluster.
      schedule: queues the work of a preparation on its worker, as an internal closure; returns None if it cannot run
        any more. Set by the scheduler.
    """

    def __init__(self) -> None:
        self.workers = 1
        self.schedule: Callable[[Preparation], Future | None] = lambda _: None
        self._requests: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A leaf: no other lock is taken while it is held.
        self._lock = threading.Lock()
        self._waiting: deque[Preparation] = deque()
        self._preparing = 0

    def request(self, build: Callable[[], object]) -> None:
        """Has the builder's thread call `build`, after all that was requested before."""
        self._requests.put(build)

    def next(self) -> Callable[[], object] | None:
        """Waits for the next request, for the builder's thread; returns None after `end`."""
        return self._requests.get()

    def end(self) -> None:
        """Ends the wait of `next`."""
        self._requests.put(None)

    def prepare(self, preparation: Preparation) -> None:
        """Has a worker prepare something once it has its turn."""
        with self._lock:
            self._waiting.append(preparation)
        self._begin()

    def _begin(self) -> None:
        """Begins what waits, as far as workers may prepare something now."""
        while True:
            with self._lock:
                if not self._waiting or self._preparing >= max(1, self.workers // 4):
                    return
                preparation = self._waiting.popleft()
                self._preparing += 1
            future = self.schedule(preparation)
            if future is None:
                self._end(preparation)
            else:
                future.add_done_callback(functools.partial(self._go_on, preparation))

    def _go_on(self, preparation: Preparation, _: Future) -> None:
        self._end(preparation)
        self._begin()

    def _end(self, preparation: Preparation) -> None:
        with self._lock:
            self._preparing -= 1
        preparation.on_end()
