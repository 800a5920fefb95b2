"""Data of which each worker of a fake runtime has its own part, which ends."""

from collections import Counter, deque
from collections.abc import Sequence

from coordinator.future import Future
from coordinator.runtime import FiniteInput, FusionKey
from coordinator.testing.fake_runtime import EndOfDataError
from coordinator.workers.scheduler import Scheduler


class FiniteData:
    """An input, and work that takes its next element.

    Args:
      parts: the elements of each worker, by index.

    Attributes:
      input: the input.
      taken: how often each element was taken.
    """

    def __init__(self, *parts: Sequence[int]) -> None:
        self.input = FiniteInput(EndOfDataError)
        self.input.is_finite = True
        self.taken: Counter[int] = Counter()
        self._parts = parts
        self._left = {worker: deque(part) for worker, part in enumerate(parts)}

    def __call__(self, worker: int) -> int:
        """Takes the next element of a worker; raises EndOfDataError if there is none."""
        if not self._left[worker]:
            raise EndOfDataError(self.input)
        element = self._left[worker].popleft()
        self.taken[element] += 1
        return element

    def most_fused(self, worker: int) -> int:
        """Returns how many elements a worker has left."""
        return len(self._left[worker])

    def rewind(self, worker: int) -> None:
        """Lets a worker begin again, as one that was restarted does."""
        self._left[worker] = deque(self._parts[worker])

    def schedule(self, scheduler: Scheduler, worker: int | None = None) -> Future:
        """Schedules a step that takes an element, and may share a call."""
        return scheduler.schedule(self, "step", worker=worker, inputs=(self.input,), fusion_key=FusionKey("step", ()))


def shards(count: int, workers: int) -> list[range]:
    """Returns the numbers below `count`, divided among workers."""
    return [range(worker, count, workers) for worker in range(workers)]
