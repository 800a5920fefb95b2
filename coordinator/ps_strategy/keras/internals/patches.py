"""Keras 3's training loop, which stays Keras' own: where it takes batches from, and what it does with one.

`Model.fit`, `evaluate` and `predict` are Keras' code with its callbacks. They ask two things of whoever distributes
training: an epoch iterator, and a function that is called for each of its turns. Both come from a `TrainerExtension`
for the models that it is for; all other models are as ever. Such a model is built from the type of its batches where
Keras would take the first one, which not every kind of data gives a second time.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

# Private: the loop of `fit` names its epoch iterator there, and takes no other.
from keras.src.backend.tensorflow import trainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator as StockEpochIterator

# Private: what is no dataset, no array and no generator passes the loop as a data adapter only.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter


class Feed(Protocol):
    """What a turn of the loop is given: the batches to come, of one epoch or of several."""

    def wait_finished(self) -> None:
        """Returns when all that was begun has finished; raises what failed."""


class TrainerExtension(Protocol):
    """Trains, evaluates and predicts in Keras' loop."""

    def is_for(self, strategy: Any) -> bool:
        """Whether models of this strategy are trained so."""

    def epoch_iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> "EpochIterator":
        """The batches of `x`; the other arguments are those of Keras' `EpochIterator`."""

    def train_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """What is called with a `Feed` for each turn, and returns logs."""

    def test_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """Likewise."""

    def predict_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """What is called with a list of batches for each turn, and returns outputs."""


class EpochIterator(StockEpochIterator):
    """The turns of an epoch, which ends when all that was begun in it has finished.

    Args:
      feeds: an iterable, each iterator of which is a `Feed`, made of a `tf.data.Dataset` (or of `OwnData`).
      x: anything that `fit` takes, or `OwnData`.
      arguments: the other arguments of Keras' `EpochIterator`.
    """

    def __init__(self, feeds: Callable[[Any], Any], x: Any, arguments: dict[str, Any]) -> None:
        # The constructor in between distributes the dataset as synchronous strategies do.
        super(StockEpochIterator, self).__init__(x=x, **arguments)
        self._is_own_and_uncounted = isinstance(x, OwnData) and self.steps_per_epoch is None
        data = x.dataset if isinstance(x, OwnData) else self.data_adapter.get_tf_dataset()
        self._element_spec = data.element_spec
        self._distributed_dataset = feeds(data)

    @property
    def batch_spec(self) -> Any:
        """What a batch is like, as `tf.TypeSpec`s; None if only a batch would tell."""
        size = self.data_adapter.batch_size

        def spec(part: Any) -> Any:
            if isinstance(part, tf.OptionalSpec):
                return None
            if not isinstance(part, tf.TensorSpec) or size is None or not part.shape.rank:
                return part
            return tf.TensorSpec([size, *part.shape[1:]], part.dtype)

        shapes = [getattr(part, "shape", None) for part in tf.nest.flatten(self._element_spec)]
        is_known = all(shape is None or (shape.rank is not None and None not in shape[1:]) for shape in shapes)
        return tf.nest.map_structure(spec, self._element_spec) if is_known else None

    def tf_sync(self) -> None:
        """Waits for the steps of the epoch."""
        if self._current_feed is not None:
            self._current_feed.wait_finished()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the epoch at the end of the data, but not before its steps have finished."""
        with super().catch_stop_iteration():
            try:
                yield
            except StopIteration:
                self.tf_sync()
                # Keras would warn, and expect as many turns of the next epoch. Here it is how epochs end.
                if not self._is_own_and_uncounted:
                    raise
                self._current_iterator = None

    def __next__(self) -> Any:
        turn = super().__next__()
        self._current_feed = turn[-1]
        return turn

    _current_feed: Feed | None = None


class OwnData(DataAdapter):
    """Data that is not on the client: a dataset of each worker's own, of which the `element_spec` is known."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def num_batches(self) -> None:
        """Not known."""
        return None

    @property
    def batch_size(self) -> None:
        """Not known."""
        return None


def extend_trainer(extension: TrainerExtension) -> None:
    """From now on, Keras' loop asks `extension` for the models that it is for."""
    for kind in ("train", "test", "predict"):
        _choose_function(kind, extension)
    _choose_epoch_iterator(extension)
    _build_from_specs()


def _choose_function(kind: str, extension: TrainerExtension) -> None:
    stock = getattr(keras.Model, f"make_{kind}_function")
    name = f"{kind}_function"

    @functools.wraps(stock)
    def make_function(self: keras.Model, force: bool = False) -> Any:
        if not extension.is_for(self.distribute_strategy):
            return stock(self, force)
        if force or getattr(self, name) is None:
            setattr(self, name, getattr(extension, name)(self))
        return getattr(self, name)

    setattr(keras.Model, f"make_{kind}_function", make_function)


def _choose_epoch_iterator(extension: TrainerExtension) -> None:
    stock = trainer.TFEpochIterator

    def epoch_iterator(distribute_strategy: Any = None, x: Any = None, **arguments: Any) -> Any:
        if extension.is_for(distribute_strategy):
            return extension.epoch_iterator(distribute_strategy, x, arguments)
        return stock(distribute_strategy, x=x, **arguments)

    trainer.TFEpochIterator = epoch_iterator


def _build_from_specs() -> None:
    # Private: where a model is built that was not called yet.
    stock = keras.Model._maybe_symbolic_build

    @functools.wraps(stock)
    def build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, EpochIterator) and (spec := iterator.batch_spec) is not None:
            iterator, data_batch = None, spec
        stock(self, iterator, data_batch)

    keras.Model._maybe_symbolic_build = build
