"""What Keras' loop calls for each of its turns of training or evaluation."""

import itertools
from typing import Any

import keras

from coordinator.ps_strategy.keras.fit.feeds import schedule_batches
from coordinator.ps_strategy.keras_fit.feed import Feed
from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps, Step
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler


class ScheduledFunction:
    """Schedules a turn of the loop and returns the newest logs that there are, which may be of an earlier turn.

    Args:
      model: a compiled model; its `steps_per_execution` is how many batches a turn takes.
      step: `model.train_step` or `model.test_step`.
      strategy: what is scheduled on.
    """

    def __init__(self, model: keras.Model, step: Step, strategy: Scheduler) -> None:
        self._strategy = strategy
        self._steps = ModelSteps(step, model.steps_per_execution)

    def __call__(self, feed: Any) -> Any:
        """One turn.

        Args:
          feed: a feed; or an iterator of batches (`train_on_batch`), of which this turn is awaited.

        Raises:
          StopIteration: there is no batch left.
          Exception: what failed in an earlier step.
        """
        if isinstance(feed, Feed):
            return feed.schedule(self._steps)
        batches = tuple(itertools.islice(feed, self._steps.steps_per_call))
        future = schedule_batches(self._strategy, self._steps.last_of, batches)
        self._strategy.join()
        return future.result()
