"""Work that may be fused, work that takes elements of data that end, and a gate that keeps both in the queue."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.future import Future
from coordinator.runtime import FiniteInput, FusionKey
from coordinator.testing.fake_runtime import EndOfDataError, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, hold

FOUR = dataclasses.replace(OPTIONS, steps_per_dispatch=4)
SAME_KEY = FusionKey("step", ())


def behind_a_gate(scheduler: Scheduler, worker: int | None = 0) -> Gate:
    """Keeps a worker busy until the gate is opened, so that closures scheduled now wait in the queue."""
    return hold(scheduler, name="gate", worker=worker)[0]


def schedule(scheduler: Scheduler, bodies: Sequence[Callable[[int], Any]], **settings: Any) -> list[Future]:
    return [scheduler.schedule(body, "step", fusion_key=SAME_KEY, **settings) for body in bodies]


def recorder(order: list[int], number: int) -> Callable[[int], int]:
    def body(_: int) -> int:
        order.append(number)
        return number

    return body


def results(futures: Sequence[Future]) -> list[Any]:
    return [future.result(LIMIT) for future in futures]


class FiniteData:
    """Data of which each worker has its own part: an input, and work that takes its next element.

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
        if not self._left[worker]:
            raise EndOfDataError(self.input)
        element = self._left[worker].popleft()
        self.taken[element] += 1
        return element

    def most_fused(self, worker: int) -> int:
        return len(self._left[worker])

    def rewind(self, worker: int) -> None:
        """Lets a worker begin again, as one that was restarted does."""
        self._left[worker] = deque(self._parts[worker])

    def schedule(self, scheduler: Scheduler, worker: int | None = None) -> Future:
        """Schedules a step that takes an element, and may share a call."""
        return scheduler.schedule(self, "step", worker=worker, inputs=(self.input,), fusion_key=SAME_KEY)


def shards(count: int, workers: int) -> list[range]:
    """Returns the numbers below `count`, divided among workers."""
    return [range(worker, count, workers) for worker in range(workers)]
