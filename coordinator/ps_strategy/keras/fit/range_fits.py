"""The calls of `fit` that run: their epochs, if they train on ranges of data, and where these begin.

The position in the data is in the folder of a backup of a model, beside the model. They are two files, and a program
may end between them. So the file of positions has the last ones, each with the number of updates of the model that it
belongs to, and is written before the model.
"""

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from coordinator.data import Epochs, Source
from coordinator.ps_strategy.keras.fit.range_data import RangeData, range_data_of_arrays, range_data_of_source
from coordinator.ps_strategy.keras.fit.range_feed import RangeFeed
from coordinator.ps_strategy.keras.internals.range_turns import RangeIterator, array_inputs
from coordinator.ps_strategy.keras.internals.sequence_states import stateful_layers
from coordinator.ps_strategy.recovery.checkpoint_owner import replace_file

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
