"""`fit` on ranges of data: of sources and epochs, and of arrays that workers can keep in their memory.

Each turn (iteration) of Keras' loop schedules the steps of one range. The worker that runs a step reads its examples.

The folder of a backup contains the file of the model and a file of positions in the data. A program may end between
writing the two files. So the file of positions is written first, and has a position for each of several models, which
are known by their number of updates.
"""

import contextlib
import dataclasses
import json
import logging
import operator
import os
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.data import Epochs, Source, arrays
from coordinator.ps_strategy.keras.feeds import Feed
from coordinator.ps_strategy.keras.internals.patches import OwnData, RangeIterator, array_inputs, stateful_layers
from coordinator.ps_strategy.keras.steps import ModelSteps
from coordinator.ps_strategy.recovery.checkpoint_owner import replace_file
from coordinator.ps_strategy.recovery.variable_store import ClientState

_logger = logging.getLogger("coordinator")

# The largest total size of arrays, in bytes, that each worker keeps in its memory. Larger arrays stay on the client.
_LARGEST_ARRAYS = 2**30
_FILE = "positions.json"
# Positions are kept for the present model, the model before it (`double_checkpoint`), and a model being written.
_KEPT = 3


class RangeData:
    """Epochs that `fit` trains on.

    `inputs` are the arrays of the epochs' source, nested like a batch; None if the source itself reads its examples.
    `has_own_seed` says that `fit` chose the seed of the epochs at random. With `inputs`, `class_weight` is not given.

    Attributes:
      epochs: the given epochs, or equal epochs with the seed of a restored backup.
      class_weight: pairs of a class and its weight, in the order of the classes.
      copies: variables with `inputs` on each worker, after `prepare`; None without `inputs`.
      batches_per_epoch, ranges_per_epoch: the number of batches and of ranges in one epoch of Keras.
      number_of_epochs: the number of epochs of Keras.
    """

    def __init__(
        self,
        epochs: Epochs,
        inputs: Any = None,
        *,
        has_own_seed: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        self.epochs = epochs
        self.class_weight = tuple(sorted((class_weight or {}).items()))
        self._has_own_seed = has_own_seed
        self._inputs = inputs
        self.copies: Any = None
        settings = epochs.settings
        batches = settings.batches_per_range
        ranges, remainder = divmod(settings.size, settings.batch_size * batches)
        self.batches_per_epoch = ranges * batches
        if remainder and not settings.drop_remainder:
            ranges += 1
            self.batches_per_epoch = -(-settings.size // settings.batch_size)
        self.ranges_per_epoch = ranges
        self.number_of_epochs = epochs.statistics().ranges // ranges

    def prepare(self, strategy: Any) -> None:
        """Prepares the source, or creates the variables that steps read on the workers."""
        if self._inputs is None:
            self.epochs.source.prepare(strategy)
            return

        def copied(part: Any) -> Any:
            # The number of rows is None in the shape, so that functions are traced once for arrays of any length.
            shape = None if part is None else [None, *part.shape[1:]]
            return shape and tf.Variable(part, shape=shape, trainable=False, per_worker_variable=True, name="data")

        with strategy.scope():
            self.copies = tf.nest.map_structure(copied, self._inputs)

    def restore(self, position: str) -> None:
        """Continues from a result of `Epochs.serialize`; raises ValueError if it belongs to other data or settings."""
        seed, settings = json.loads(position)["shuffle"], self.epochs.settings
        if self._has_own_seed and seed not in (None, settings.shuffle):
            of_fit = settings.batch_size, self.number_of_epochs, seed, settings.batches_per_range
            self.epochs = Epochs(self.epochs.source, *of_fit)
        self.epochs.deserialize(position)

    def element_spec(self, strategy: Any) -> Any:
        """Returns the type of a batch, as nested `tf.TypeSpec`s, after `prepare`."""
        if self._inputs is not None:
            return tf.nest.map_structure(
                lambda part: None if part is None else tf.TensorSpec([None, *part.shape[1:]], part.dtype), self._inputs
            )
        with strategy.scope():
            spec = self.epochs.source.element_spec()
        return (*spec, tf.TensorSpec([None], tf.float32)) if self.class_weight else spec


def _data_of_source(x: Source | Epochs, given: Mapping[str, Any], steps_per_execution: int) -> RangeData:
    """Returns the training data for a source or epochs; raises ValueError for arguments that `fit` refuses with it."""
    refused = [name for name in ("y", "sample_weight", "steps_per_epoch") if given.get(name) is not None]
    class_weight = given.get("class_weight")
    if given.get("validation_split"):
        refused.append("validation_split")
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot be given along with a source or Epochs of coordinator.data: the source gives "
            "(x, y) or (x, y, sample_weight), and an epoch is all of its examples. Put weights into the source, and "
            "make a source for validation."
        )
    if isinstance(x, Source):
        shuffle, batch_size = given.get("shuffle", not x.is_sequential), given.get("batch_size") or 32
        epochs = Epochs(x, batch_size, given.get("epochs", 1), _seed(shuffle), steps_per_execution)
        return RangeData(epochs, has_own_seed=shuffle is True, class_weight=class_weight)
    data = RangeData(x, class_weight=class_weight)
    if given.get("epochs") == data.number_of_epochs:
        given = {name: value for name, value in given.items() if name != "epochs"}
    if refused := [name for name in ("batch_size", "shuffle", "epochs") if name in given]:
        raise ValueError(f"{', '.join(refused)} cannot be given along with Epochs, which have their own.")
    batches = x.settings.batches_per_range
    if steps_per_execution not in (1, batches):
        raise ValueError(
            f"The model was compiled with steps_per_execution={steps_per_execution}, and the Epochs have "
            f"batches_per_range={batches}: make them equal, or leave steps_per_execution out."
        )
    return data


def _data_of_arrays(x: Any, given: Mapping[str, Any], arguments: dict[str, Any]) -> RangeData | None:
    """Returns the training data for arrays; None for other data, and for arrays that the client should read."""
    inputs_and_size = array_inputs(x, arguments)
    if inputs_and_size is None:
        return None
    inputs, batch_size = inputs_and_size
    parts = [part for part in tf.nest.flatten(inputs) if part is not None]
    shuffle = arguments.get("shuffle", True)
    if shuffle not in (True, False) or sum(part.nbytes for part in parts) > _LARGEST_ARRAYS or not len(parts[0]):
        return None
    batch_size, number = operator.index(batch_size), operator.index(given.get("epochs", 1))
    if number < 1:
        return None
    epochs = Epochs(arrays(*parts), batch_size, number, _seed(shuffle), arguments.get("steps_per_execution", 1))
    epochs.begin_at(given.get("initial_epoch", 0))
    return RangeData(epochs, inputs, has_own_seed=bool(shuffle))


def _seed(shuffle: Any) -> int | None:
    if isinstance(shuffle, (bool, np.bool_)):
        # `keras.utils.set_random_seed` seeds the module `random`.
        return random.randrange(2**31) if shuffle else None
    if not isinstance(shuffle, int):
        raise ValueError(f"shuffle must be True, False or a seed for a source, got {shuffle!r}.")
    return shuffle


class RangeFeed(Feed, ClientState):
    """A feed that schedules the steps of one range at each turn.

    Guarantees:
    - An epoch of Keras' loop ends when all ranges of the data's epochs up to this epoch are done. If a parameter server
      was lost, ranges that were rolled back are done again.
    - A range counts as done when its steps have finished.
    - After a recovery, the model's metrics have the values that they had at the checkpoint. The feed saves these
      values, because no checkpoint contains metrics. If the checkpoint is of another epoch of the loop, the metrics
      begin at zero, because Keras has read the metrics of that epoch at the end of the epoch.
    """

    def __init__(self, data: RangeData, strategy: Any, model: keras.Model) -> None:
        super().__init__(strategy)
        self._data = data
        self._model = model
        # The present epoch of the loop ends before this epoch of the data; None before the first epoch.
        self._until: int | None = None
        self._ranges: Any = None
        self._positions: Any = None
        strategy.extended.services.variables.add_state(self)

    def turns(self) -> Iterator[int]:
        """Begins the next epoch. Yields for each turn the position of the turn's first batch in the epoch.

        The position is 0 after a rollback to an earlier epoch. Raises errors of steps.
        """
        data, epochs = self._data, self._data.epochs
        self._until = (epochs.epoch if self._until is None else self._until) + 1
        ranges_before = (self._until - 1) * data.ranges_per_epoch
        self.close()
        self._ranges = epochs.on(self._strategy, until=self._until)
        for positions in self._ranges:
            self._positions = positions
            statistics = epochs.statistics()
            place = max(0, statistics.done + statistics.out - 1 - ranges_before)
            yield place * epochs.settings.batches_per_range

    def schedule(self, steps: ModelSteps) -> Any:
        function, arguments = steps.of_range(self._data, self._positions)
        self.add(self._strategy.schedule(function, args=arguments))
        return self.wait_room()

    def close(self) -> None:
        """Gives back the range of a turn that was not scheduled."""
        if self._ranges is not None:
            self._ranges.close()

    # `ClientState` describes these methods. Before `deserialize`, all variables have their initial values.

    def serialize(self) -> Any:
        return self._until, [variable.numpy().tolist() for variable in self._model.metrics_variables]

    def deserialize(self, saved: Any) -> None:
        """Assigns the saved values to the metrics if they are of this epoch."""
        until, values = saved
        if until == self._until:
            for variable, value in zip(self._model.metrics_variables, values, strict=False):
                variable.assign(value)


@dataclasses.dataclass(eq=False)
class _Fit:
    """A call of `fit`: the model and the arguments by name; if the data are ranges, also the data and the feed.

    For arrays, `data` is set when Keras asks for the turns.
    """

    model: keras.Model
    given: dict[str, Any]
    data: RangeData | None = None
    feed: RangeFeed | None = None


class RangeFits:
    """The running calls of `fit`, with the ranges that each call trains on, and the epoch in which it begins."""

    def __init__(self) -> None:
        # A list for each thread, because a callback of a `fit` may call another `fit`.
        self._running = threading.local()

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, given: dict[str, Any]) -> Iterator[None]:
        """A scope for a call of `fit`; replaces the arguments in `given` that Keras must get in another form.

        Raises ValueError if `fit` cannot combine an argument, or a layer with `stateful=True`, with a source or epochs.
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
            fit.data = given["x"] = _data_of_source(x, given, model.steps_per_execution)
            epochs = fit.data.epochs
            epochs.begin_at(given.get("initial_epoch", 0))
            given["epochs"], given["initial_epoch"] = fit.data.number_of_epochs, epochs.epoch
            if epochs.done:
                _logger.warning("fit has no data left: %r. Make new Epochs to train again.", epochs)
        fits = self._fits()
        fits.append(fit)
        try:
            yield
        finally:
            fits.remove(fit)
            if fit.feed is not None:
                fit.feed.close()

    def iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> RangeIterator | None:
        """Returns the turns of the call of `fit` that has just begun; None if the data of the call are not ranges."""
        fit = self._fits()[-1]
        # A layer with `stateful=True` needs the batches in order, and ranges run in any order.
        if fit.data is None and not stateful_layers(fit.model):
            fit.data = _data_of_arrays(x, fit.given, arguments)
        data = fit.data
        if data is None:
            return None
        data.prepare(strategy)
        feed = fit.feed = RangeFeed(data, strategy, fit.model)
        settings = data.epochs.settings
        batches = OwnData(data.element_spec(strategy), data.batches_per_epoch, settings.batch_size)
        return RangeIterator(lambda _: feed, batches, {"steps_per_execution": settings.batches_per_range})

    @contextlib.contextmanager
    def saving(self, model: keras.Model, folder: str) -> Iterator[None]:
        """A scope in which Keras saves a model to a backup's folder. No step runs; the position is saved first."""
        with model.distribute_strategy.quiet():
            data = self._data_of(model)
            if data is not None:
                save_position(folder, _updates(model), data.epochs.serialize())
            yield

    def restored(self, model: keras.Model, folder: str, epoch: int | None) -> int | None:
        """Has `fit` continue at the position of a model that may have been read from a backup's folder.

        `epoch` is where Keras would begin; None means the `initial_epoch` of `fit`. Returns the epoch where `fit`
        must begin, or None. Raises ValueError if the position belongs to other data or settings.
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


def _updates(model: keras.Model) -> int:
    return 0 if model.optimizer is None else int(model.optimizer.iterations.numpy())


def save_position(folder: str, updates: int, position: str) -> None:
    """Saves a position, a result of `Epochs.serialize`, in a backup's folder. The model must be saved afterwards."""
    tf.io.gfile.makedirs(folder)
    kept = [saved for saved in _positions(folder) if saved[0] != updates][1 - _KEPT :]
    replace_file(os.path.join(folder, _FILE), json.dumps([*kept, [updates, position]]))


def position_at(folder: str, updates: int) -> str | None:
    """Returns the position of a model with this number of updates; None if unknown."""
    return dict(_positions(folder)).get(updates)


def _positions(folder: str) -> list[tuple[int, str]]:
    path = os.path.join(folder, _FILE)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path, "r") as file:
        return [(updates, position) for updates, position in json.loads(file.read())]
