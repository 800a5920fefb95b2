"""The turns of `evaluate` and `predict` for sources of `coordinator.data`: a batch is a range, read by its step."""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.data import Source
from coordinator.future import Future
from coordinator.ps_strategy.keras.evaluation.shards import ranges_of, shard_count, source_shards
from coordinator.ps_strategy.keras.fit.evaluation_feed import EvaluationFeed
from coordinator.ps_strategy.keras.fit.feeds import ClientFeed
from coordinator.ps_strategy.keras.fit.steps import ModelSteps
from coordinator.ps_strategy.keras.internals.patches import EpochIterator, OwnData

# As in Keras.
_BATCH_SIZE = 32


class SourceFeed(ClientFeed):
    """Schedules the steps of the batches of a source, in their order.

    Args:
      source: prepared for the strategy.
      batch_size: the number of examples in a batch.
      strategy: the strategy that steps are scheduled on.
    """

    def __init__(self, source: Source, batch_size: int, strategy: Any) -> None:
        super().__init__(map(source.reader(), ranges_of(source, batch_size)), strategy)
        self._source = source

    def schedule_ahead(self, steps: ModelSteps, batches: Sequence[Any]) -> Future:
        """See `ClientFeed`."""
        return super().schedule_ahead(steps.reading(self._source), batches)


def evaluation_of_source(source: Source, strategy: Any, arguments: dict[str, Any]) -> EpochIterator:
    """Returns the turns of an evaluation of all examples.

    Args:
      source: the data.
      strategy: the model's strategy.
      arguments: the other arguments of Keras' `EpochIterator`.

    Raises:
      ValueError: an argument does not go with a source.
    """
    names = {"y": "y", "sample_weight": "sample_weight", "steps_per_epoch": "steps or validation_steps"}
    given = [name for argument, name in names.items() if arguments.get(argument) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be given along with a source of coordinator.data, which gives (x, y) or "
            "(x, y, sample_weight), and is evaluated to its end."
        )
    size = arguments.get("batch_size") or _BATCH_SIZE

    def create() -> EvaluationFeed:
        return EvaluationFeed(source_shards(source, size, shard_count(None, strategy)), strategy)

    return _turns(source, size, strategy, arguments, create)


def prediction_of_source(
    source: Source, strategy: Any, arguments: dict[str, Any], begin: Callable[[SourceFeed], Any]
) -> EpochIterator:
    """Returns the turns of a prediction of all examples, or of those of `steps_per_epoch` batches.

    Args:
      source: the data.
      strategy: the model's strategy.
      arguments: the other arguments of Keras' `EpochIterator`.
      begin: called with each feed before its first turn.
    """
    size = arguments.get("batch_size") or _BATCH_SIZE

    def create() -> SourceFeed:
        feed = SourceFeed(source, size, strategy)
        begin(feed)
        return feed

    return _turns(source, size, strategy, arguments, create)


def _turns(
    source: Source, batch_size: int, strategy: Any, arguments: dict[str, Any], create_feed: Callable[[], Any]
) -> EpochIterator:
    source.prepare(strategy)
    with strategy.scope():
        types_of_batch = types.SimpleNamespace(element_spec=source.element_spec())
    data = OwnData(types_of_batch, math.ceil(source.size / batch_size), batch_size)
    return EpochIterator(lambda _: create_feed(), data, arguments)
