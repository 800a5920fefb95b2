"""Runs scheduled functions in calls that are fused as far as possible, whether or not it is faster."""

from collections.abc import Iterable, Sequence
from typing import Any

import coordinator
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.workers.fusion_size import FusionSizeModel
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0
STEPS = 4
# For each of two workers a fused call, and some more.
COUNT = 2 * (STEPS + 2)


class FusedCalls:
    """Runs functions on the shared strategy, on each worker up to `STEPS` in one call.

    Args:
      strategy: whose workers they are.
      monkeypatch: undoes all this after the test.

    Attributes:
      sizes: the sizes of the fused calls so far.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy, monkeypatch: Any) -> None:
        self.sizes: list[int] = []
        self._strategy = strategy
        run_fused, run_steps = TensorFlowRuntime.run_fused, TensorFlowRuntime.run_steps
        steps = FusionSizeModel.steps
        fixed = FusionSizeModel(STEPS)

        def recorded(runtime: TensorFlowRuntime, worker: int, works: Sequence[Any], cancellation: Any) -> Any:
            self.sizes.append(len(works))
            return run_fused(runtime, worker, works, cancellation)

        def recorded_steps(runtime: TensorFlowRuntime, worker: int, work: Any, count: int, cancellation: Any) -> Any:
            self.sizes.append(count)
            return run_steps(runtime, worker, work, count, cancellation)

        monkeypatch.setattr(TensorFlowRuntime, "run_fused", recorded)
        monkeypatch.setattr(TensorFlowRuntime, "run_steps", recorded_steps)
        monkeypatch.setattr(
            FusionSizeModel, "steps", lambda _, function, available, *__: steps(fixed, function, available)
        )

    def run(self, fn: Any, arguments: Iterable[Sequence[Any]]) -> list[coordinator.Future]:
        """Schedules calls that all wait before the first begins; returns their futures when all have ended."""
        gate = Gate(self._strategy)
        gate.occupy(len(self._strategy.cluster.workers))
        futures = [self._strategy.schedule(fn, args) for args in arguments]
        gate.open()
        self._strategy.join(TIMEOUT)
        return futures
