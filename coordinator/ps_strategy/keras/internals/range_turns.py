"""The turns of Keras' loop where each is a range of `coordinator.data.Epochs`; and what Keras knows of arrays."""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Private: Keras' adapter has the arrays with their weights, but offers them only as a dataset of the client; its
# conversions are used for the same types and dtypes.
from keras.src import tree
from keras.src.backend import config
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable

from coordinator.ps_strategy.keras.internals.patches import EpochIterator, OwnData


class RangeIterator(EpochIterator):
    """The turns of an epoch, which ends when the feed has no more, whatever number of them was expected.

    Args:
      feed: see `EpochIterator`; its `turns()` yields, for each turn, the place of its first batch in the epoch.
      element_spec: the type of a batch, as nested `tf.TypeSpec`s.
      batch_size: the number of examples in a batch.
      batches_per_epoch: how many batches are expected.
      batches_per_turn: how many batches a turn has.
    """

    def __init__(
        self, feed: Any, element_spec: Any, batch_size: int, batches_per_epoch: int, batches_per_turn: int
    ) -> None:
        data = OwnData(types.SimpleNamespace(element_spec=element_spec), batches_per_epoch, batch_size)
        super().__init__(lambda _: feed, data, {"steps_per_execution": batches_per_turn})
        self._feed = feed

    def _enumerate_iterator(self) -> Iterator[Any]:
        for place in self._feed.turns():
            yield place, place + self.steps_per_execution - 1, self._feed


def array_inputs(x: Any, arguments: dict[str, Any]) -> tuple[Any, int] | None:
    """Returns the arrays of a call of `fit`, nested as a batch is, with class weights applied; and the batch size.

    Args:
      x: anything that `fit` takes.
      arguments: the other arguments of Keras' epoch iterator.

    Returns:
      NumPy arrays of numbers, and None for the parts that batches do not have; None for other data, and where an epoch
      is not to be all of it.

    Raises:
      ValueError: what Keras raises for arrays that do not fit together.
    """
    y, sample_weight = arguments.get("y"), arguments.get("sample_weight")
    is_whole = arguments.get("steps_per_epoch") is None and config.max_steps_per_epoch() is None
    if x is None or not is_whole or not can_convert_arrays((x, y, sample_weight)):
        return None
    names = ("sample_weight", "batch_size", "shuffle", "class_weight")
    adapter = ArrayDataAdapter(x, y, **{name: arguments[name] for name in names if name in arguments})
    inputs = tree.lists_to_tuples(adapter._inputs)
    if not all(_is_numeric(part) for part in tf.nest.flatten(inputs) if part is not None):
        return None
    parts = tf.nest.map_structure(lambda part: None if part is None else _converted(part), inputs)
    return parts, adapter.batch_size


def _is_numeric(part: Any) -> bool:
    if isinstance(part, tf.Tensor):
        return bool(part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_bool)
    return isinstance(part, np.ndarray) and part.dtype.kind in "biuf"


def _converted(part: Any) -> Any:
    sliceable = convert_to_sliceable(part, target_backend="numpy")
    return sliceable.convert_to_numpy(sliceable[:])
