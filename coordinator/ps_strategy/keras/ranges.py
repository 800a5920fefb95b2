"""The turns of `evaluate` and `predict` for sources of `coordinator.data`: a batch is a range, read by its step.

The calls of `fit` that run: their epochs, if they train on ranges of data, and where these begin.

The position in the data is in the folder of a backup of a model, beside the model. They are two files, and a program
may end between them. So the file of positions has the last ones, each with the number of updates of the model that it
belongs to, and is written before the model.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.data import Epochs, Source
from coordinator.future import Future
from coordinator.ps_strategy.keras.feeds import ClientFeed, EvaluationFeed, Feed
from coordinator.ps_strategy.keras.internals.patches import (
    EpochIterator,
    OwnData,
    RangeIterator,
    array_inputs,
    stateful_layers,
)
from coordinator.ps_strategy.keras.shards import ranges_of, shard_count, source_shards
from coordinator.ps_strategy.keras.steps import ModelSteps, RangeData, range_data_of_arrays, range_data_of_source
from coordinator.ps_strategy.recovery.checkpoint_owner import replace_file


class RangeFeed(Feed):
    """Schedules the steps of one range at each turn. A step reads the examples where it runs.

    Guarantees:
    - An epoch of the loop ends when all ranges of the data's epochs up to this one are done. If a parameter server was
      lost, it does again what was rolled back.
    - A range counts when its steps have finished.

    Args:
      data: prepared for the strategy.
      strategy: the strategy that steps are scheduled on.

    Attributes:
      until: the epoch of the data that the present epoch of the loop ends before; None before the first one.
    """

    def __init__(self, data: RangeData, strategy: Any) -> None:
        super().__init__(strategy)
        self._data = data
        self.until: int | None = None
        self._ranges: Any = None
        self._positions: Any = None

    def turns(self) -> Iterator[int]:
        """Begins the next epoch.

        Yields:
          For each turn, the place of its first batch in the epoch; after a roll back to an earlier epoch 0.

        Raises:
          Exception: what a step raised.
        """
        epochs = self._data.epochs
        self.until = (epochs.epoch if self.until is None else self.until) + 1
        self.close()
        self._ranges = epochs.on(self._strategy, until=self.until)
        for positions in self._ranges:
            self._positions = positions
            yield self._place()

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        function, arguments = steps.of_range(self._data, self._positions)
        self.add(self._strategy.schedule(function, args=arguments))
        return self.wait_room()

    def close(self) -> None:
        """Gives back the range of a turn that was not scheduled."""
        if self._ranges is not None:
            self._ranges.close()

    def _place(self) -> int:
        assert self.until is not None
        data = self._data
        found = data.epochs.statistics()
        ranges = found.done + found.out - 1 - (self.until - 1) * data.ranges_per_epoch
        return max(0, ranges) * data.epochs.settings.batches_per_range


_logger = logging.getLogger("coordinator")

# The positions in a backup's folder.
_FILE = "positions.json"
# One for the model that is there, one for the model before it (`double_checkpoint`), and one that is being written.
_KEPT = 3


@dataclasses.dataclass(eq=False)
class _Fit:
    """A call of `fit`.

    Attributes:
      model: what is trained.
      given: the arguments of `fit`, by name.
      data: what it trains on, if that is ranges; of arrays, it is known when Keras asks for their turns.
      feed: likewise.
      metrics: likewise.
    """

    model: keras.Model
    given: dict[str, Any]
    data: RangeData | None = None
    feed: RangeFeed | None = None
    metrics: Any = None


class _EpochMetrics:
    """What the metrics of a model hold at a checkpoint: they are in none, and would begin at zero after a recovery.

    If the checkpoint is of another epoch of the loop, they do: those of its epoch were read when that ended.

    Args:
      model: has the metrics.
      feed: knows the epoch.
    """

    def __init__(self, model: keras.Model, feed: RangeFeed) -> None:
        self._model = model
        self._feed = feed

    def serialize(self) -> Any:
        """Returns the epoch and the values."""
        return self._feed.until, [variable.numpy().tolist() for variable in self._model.metrics_variables]

    def deserialize(self, saved: Any) -> None:
        """Assigns the values, if they are of this epoch."""
        until, values = saved
        if until == self._feed.until:
            for variable, value in zip(self._model.metrics_variables, values, strict=False):
                variable.assign(value)

    def reset(self) -> None:
        """Leaves it to the recovery, which gives all variables their initial values."""

    def hold(self) -> None:
        """Does nothing: metrics are read when no step runs."""

    def resume(self) -> None:
        """See `hold`."""


class RangeFits:
    """Has `fit` train on ranges: of sources and epochs, and of arrays that workers can keep in their memory."""

    def __init__(self) -> None:
        # A callback of a `fit` may call another one.
        self._running = threading.local()

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, given: dict[str, Any]) -> Iterator[None]:
        """A scope for a call of `fit`.

        Args:
          model: what is trained.
          given: the arguments of `fit`, by name; those that Keras is to be given instead are changed.

        Raises:
          ValueError: an argument, or a layer with a state of sequences, does not go with a source or epochs.
        """
        fit = _Fit(model, given)
        x = given.get("x")
        if isinstance(x, Source | Epochs):
            if layers := stateful_layers(model):
                raise ValueError(
                    f"The layer {layers[0].name!r} has stateful=True: each batch continues the sequences of the batch "
                    f"before it. But ranges of {x!r} go to any worker, in any order. Give fit a dataset function, so "
                    "that each worker reads sequences of its own; or arrays, with one worker."
                )
            fit.data = given["x"] = range_data_of_source(x, given, model.steps_per_execution)
            fit.data.epochs.begin_at(given.get("initial_epoch", 0))
            given["epochs"], given["initial_epoch"] = fit.data.number_of_epochs, fit.data.epochs.epoch
            if fit.data.epochs.done:
                _logger.warning("fit has no data left: %r. Make new Epochs to train again.", fit.data.epochs)
        fits = self._fits()
        fits.append(fit)
        try:
            yield
        finally:
            fits.remove(fit)
            if fit.feed is not None:
                fit.feed.close()

    def iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> RangeIterator | None:
        """Returns the turns of the call of `fit` that has just begun; None if its data are not ranges.

        Args:
          strategy: the model's strategy.
          x: the data.
          arguments: the other arguments of Keras' epoch iterator.
        """
        fit = self._fits()[-1]
        # Ranges have no order, which a layer with a state of sequences needs.
        if fit.data is None and not stateful_layers(fit.model):
            fit.data = _data_of_arrays(fit, x, arguments)
        if fit.data is None:
            return None
        data = fit.data
        data.prepare(strategy)
        fit.feed = RangeFeed(data, strategy)
        fit.metrics = _EpochMetrics(fit.model, fit.feed)
        strategy.extended.services.variables.add_state(fit.metrics)
        settings = data.epochs.settings
        return RangeIterator(
            fit.feed,
            data.element_spec(strategy),
            settings.batch_size,
            data.batches_per_epoch,
            settings.batches_per_range,
        )

    @contextlib.contextmanager
    def saving(self, model: keras.Model, folder: str) -> Iterator[None]:
        """A scope in which a model is saved to a folder: no step runs, and its position is there before.

        Args:
          model: the model.
          folder: of the backup.
        """
        with model.distribute_strategy.quiet():
            data = self._data_of(model)
            if data is not None:
                save_position(folder, _updates(model), data.epochs.serialize())
            yield

    def restored(self, model: keras.Model, folder: str, epoch: int | None) -> int | None:
        """Has `fit` continue with the position of a model that may have been read from a folder.

        Args:
          model: the model.
          folder: of the backup.
          epoch: where Keras would begin; None for what `fit` was given.

        Returns:
          Where it is to begin, likewise.

        Raises:
          ValueError: the position is of other data or settings.
        """
        data = self._data_of(model)
        if data is None:
            return epoch
        if (position := position_at(folder, _updates(model))) is not None:
            data.restore(position)
            return data.epochs.epoch
        data.epochs.begin_at(epoch or 0)
        return epoch

    def _data_of(self, model: keras.Model) -> RangeData | None:
        return next((fit.data for fit in reversed(self._fits()) if fit.model is model), None)

    def _fits(self) -> list[_Fit]:
        return self._running.__dict__.setdefault("fits", [])


def _data_of_arrays(fit: _Fit, x: Any, arguments: dict[str, Any]) -> RangeData | None:
    found = array_inputs(x, arguments)
    if found is None:
        return None
    given = fit.given
    data = range_data_of_arrays(
        *found, given.get("epochs", 1), arguments.get("shuffle", True), arguments.get("steps_per_execution", 1)
    )
    if data is not None:
        data.epochs.begin_at(given.get("initial_epoch", 0))
    return data


def _updates(model: keras.Model) -> int:
    return 0 if model.optimizer is None else int(model.optimizer.iterations.numpy())


def save_position(folder: str, updates: int, position: str) -> None:
    """Saves a position; the model is to be saved after it.

    Args:
      folder: of the backup.
      updates: how many the model has had.
      position: what `Epochs.serialize` has returned.
    """
    tf.io.gfile.makedirs(folder)
    kept = [each for each in _positions(folder) if each[0] != updates][1 - _KEPT :]
    replace_file(os.path.join(folder, _FILE), json.dumps([*kept, [updates, position]]))


def position_at(folder: str, updates: int) -> str | None:
    """Returns the position of a model that has had this number of updates; None if it is not known."""
    return dict(_positions(folder)).get(updates)


def _positions(folder: str) -> list[tuple[int, str]]:
    path = os.path.join(folder, _FILE)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path, "r") as file:
        return [(updates, position) for updates, position in json.loads(file.read())]


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
