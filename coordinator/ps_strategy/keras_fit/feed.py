"""What Keras' loop is given for each of its turns: the batches to come, and the steps that were begun with them."""

import abc
from typing import Any, Self

from coordinator.ps_strategy.keras.fit.steps import StepsInFlight
from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler


class Feed(abc.ABC):
    """Schedules steps with the next batches, of one epoch or of several.

    Args:
      strategy: what is scheduled on.
    """

    def __init__(self, strategy: Scheduler) -> None:
        self._strategy = strategy
        self._in_flight = StepsInFlight(strategy)

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def schedule(self, steps: ModelSteps) -> Any:
        """Begins a turn of the loop.

        Returns:
          The newest result that there is of this epoch's steps.

        Raises:
          StopIteration: there is no batch left.
          Exception: what failed in an earlier step; `tf.errors.OutOfRangeError` if a worker's data has ended although
            the loop counts its steps.
        """

    def wait_finished(self) -> None:
        """Returns when all steps have finished; raises what failed."""
        self._in_flight.wait_finished()
