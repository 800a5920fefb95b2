"""What Keras' loop calls for each of its turns of prediction."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.fit.feeds import ClientFeed, schedule_batches
from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler


class ScheduledPrediction:
    """Returns the outputs of a turn of the loop, while workers are at the turns to come.

    Args:
      model: a model; its `steps_per_execution` is how many batches a turn takes.
      strategy: what is scheduled on.
      latest_feed: the feed that was made last, or None.
    """

    def __init__(self, model: keras.Model, strategy: Scheduler, latest_feed: Callable[[], ClientFeed | None]) -> None:
        self._strategy = strategy
        self._steps = ModelSteps(model.predict_step, model.steps_per_execution)
        self._latest_feed = latest_feed

    def __call__(self, batches: Sequence[Any]) -> Any:
        """One turn.

        Args:
          batches: up to `steps_per_execution` batches.

        Returns:
          What `predict_step` returns, for all of them together, on the client.

        Raises:
          Exception: what failed.
        """
        # Keras tells the batches, but not whose they are.
        feed = self._latest_feed()
        if feed is not None and feed.has_given(batches[-1]):
            future = feed.schedule_ahead(self._steps, batches)
        else:
            future = schedule_batches(self._strategy, self._steps.all_of, batches)
        try:
            outputs = future.result()
        except Exception:
            # The strategy is not to raise it once more.
            self._strategy.join()
            raise
        return tf.nest.map_structure(_joined, *outputs)


def _joined(*outputs: Any) -> Any:
    """The outputs of several batches as one."""
    if isinstance(outputs[0], tf.SparseTensor):
        return tf.sparse.concat(0, outputs)
    if isinstance(outputs[0], tf.RaggedTensor) or outputs[0].ndim:
        return tf.concat(outputs, 0)
    return tf.stack(outputs)
