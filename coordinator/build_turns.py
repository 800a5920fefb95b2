"""Which workers may run a function for the first time, so that the others go on meanwhile.

Whenever a worker runs a function for the first time, the function is traced on the client, sent to the servers, and
prepared on the worker, which takes up to seconds. All workers want a larger call, or one with packed messages, at about
the same time. Each that has its turn builds it; the others use what they have already.

    worker 0   1 1 1 1 [4, built and prepared ] 4 4 4 4 4 4 4 4
    worker 1   1 1 1 1  1  1  1  1  1  1  1  1 [4, prepared ] 4      what was built for one worker is used by all

Guarantees: at most half of the workers, but at least one, have a turn at a time; nothing waits for a turn; one that is
not given back, because a call never returns, ends by itself.
"""

import threading
import time

# The longest turn that others respect, in seconds.
_MOST_SECONDS = 60.0


class BuildTurns:
    """The turns of the workers of one strategy; any thread may use it.

    Attributes:
      workers: the number of workers, set by the cluster.
    """

    def __init__(self) -> None:
        self.workers = 1
        # A leaf: no other lock is taken while it is held.
        self._lock = threading.Lock()
        # When each turn began, on the `time.monotonic` clock, by worker.
        self._began: dict[int, float] = {}

    def take(self, worker: int) -> bool:
        """Returns whether a worker has a turn now; then `give_back` must follow."""
        now = time.monotonic()
        with self._lock:
            others = sum(now - began < _MOST_SECONDS for other, began in self._began.items() if other != worker)
            if others >= max(1, self.workers // 2):
                return False
            self._began[worker] = now
            return True

    def give_back(self, worker: int) -> None:
        """Ends the turn of a worker."""
        with self._lock:
            self._began.pop(worker, None)
