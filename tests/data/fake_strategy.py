"""What `Epochs` needs of a strategy, on workers in memory."""

import types
from collections.abc import Callable
from typing import Any

from coordinator.data.ranges import position_ranges
from coordinator.future import Future
from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler


class FakeStrategy:
    """Schedules Python functions `step(worker, *args)`.

    Args:
      options: of the scheduler.
      workers: how many.
    """

    def __init__(self, options: Options, workers: int = 2) -> None:
        self.runtime = FakeRuntime(workers)
        self.scheduler = Scheduler(self.runtime, self.runtime, options)
        self.cluster = self.scheduler.cluster
        self.states: list[Any] = []
        services = types.SimpleNamespace(options=options, variables=types.SimpleNamespace(add_state=self.states.append))
        self.extended = types.SimpleNamespace(services=services)

    def schedule(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Future:
        """Schedules `step`, as a strategy does."""
        followers = [each.follow for each in position_ranges(args, {})]
        return self.scheduler.schedule(lambda worker: step(worker, *args), "step", followers=followers)

    def close(self) -> None:
        """Ends the threads."""
        self.scheduler.close()
