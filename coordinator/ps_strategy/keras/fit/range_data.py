"""What `fit` trains on as ranges of `coordinator.data.Epochs`: such epochs, a source, or arrays, which become one."""

import json
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data import Epochs, Source, arrays
from coordinator.data.source import example_indices

# Larger arrays stay on the client: each worker would have to keep them in its memory. In bytes, of all together.
_LARGEST_ARRAYS = 2**30


class RangeData:
    """Epochs that `fit` trains on.

    Args:
      epochs: the epochs.
      inputs: the arrays that their source has, nested as a batch is; None if the source reads its examples by itself.
      has_own_seed: whether the seed of the epochs was chosen for them, at random.
      class_weight: the weight of the examples of each class, of what the source reads; see `Model.fit`.

    Attributes:
      epochs: as given, or with the seed of a backup.
      class_weight: as given, in the order of the classes.
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
        self._copies: Any = None

    def prepare(self, strategy: Any) -> None:
        """Creates what steps read on the workers of a strategy."""
        if self._inputs is None:
            self.epochs.source.prepare(strategy)
            return

        def copied(part: Any) -> Any:
            # The number of rows is not in the shape, so that functions are traced once for arrays of any length.
            shape = None if part is None else [None, *part.shape[1:]]
            return shape and tf.Variable(part, shape=shape, trainable=False, per_worker_variable=True, name="data")

        with strategy.scope():
            self._copies = tf.nest.map_structure(copied, self._inputs)

    def restore(self, position: str) -> None:
        """Continues from what `serialize` of the epochs has returned, perhaps in another program.

        Raises:
          ValueError: it is of other data or settings.
        """
        seed, settings = json.loads(position)["shuffle"], self.epochs.settings
        if self._has_own_seed and seed not in (None, settings.shuffle):
            of_fit = settings.batch_size, self.number_of_epochs, seed, settings.batches_per_range
            self.epochs = Epochs(self.epochs.source, *of_fit)
        self.epochs.deserialize(position)

    @property
    def copies(self) -> Any:
        """What `rows_at` takes, after `prepare`; None if the source reads its examples by itself."""
        return self._copies

    def element_spec(self, strategy: Any) -> Any:
        """Returns the type of a batch, as nested `tf.TypeSpec`s, after `prepare`."""
        if self._inputs is not None:
            return tf.nest.map_structure(_spec_of_rows, self._inputs)
        with strategy.scope():
            spec = self.epochs.source.element_spec()
        return (*spec, tf.TensorSpec([None], tf.float32)) if self.class_weight else spec

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches."""
        settings = self.epochs.settings
        width = settings.batch_size * settings.batches_per_range
        if settings.drop_remainder:
            return int(settings.size // width * settings.batches_per_range)
        return int(-(-settings.size // settings.batch_size))

    @property
    def ranges_per_epoch(self) -> int:
        """The number of ranges."""
        return -(-self.batches_per_epoch // self.epochs.settings.batches_per_range)

    @property
    def number_of_epochs(self) -> int:
        """The number of passes over the data."""
        return self.epochs.statistics().ranges // self.ranges_per_epoch


def weighted(batch: Any, class_weight: Sequence[tuple[int, float]]) -> Any:
    """Returns a batch with sample weights by the class of each example; those of other classes have 1.

    Args:
      batch: nested tensors: `(x, y)` with the number of a class for each example, or a value for each class.
      class_weight: classes and their weights; empty for the batch as it is.

    Raises:
      ValueError: the batch is another one.
    """
    if not class_weight:
        return batch
    if not (isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], tf.Tensor)):
        raise ValueError(
            "class_weight takes data that gives (x, y), with one tensor y and no sample weights; this source gives "
            f"{tf.nest.map_structure(tf.type_spec_from_value, batch)}. Leave class_weight out, and put the weights "
            "into the source."
        )
    x, y = batch
    classes = tf.argmax(y, -1) if y.shape.rank == 2 and y.shape[-1] != 1 else tf.reshape(y, [-1])
    classes = tf.cast(tf.round(classes) if classes.dtype.is_floating else classes, tf.int64)
    numbers, weights = zip(*class_weight, strict=True)
    is_class = tf.equal(classes[:, tf.newaxis], tf.constant(numbers, tf.int64))
    return x, y, 1 + tf.reduce_sum(tf.where(is_class, tf.constant(weights, tf.float32) - 1, 0.0), 1)


def rows_at(inputs: Any, positions: Any) -> Any:
    """Returns the examples of a range.

    Args:
      inputs: nested variables with all examples, and None where batches have no part.
      positions: the range.
    """
    first = next(part for part in tf.nest.flatten(inputs) if part is not None)
    size = tf.raw_ops.VariableShape(input=first.handle, out_type=tf.int64)[0]
    indices = example_indices(positions, size)
    return tf.nest.map_structure(lambda part: None if part is None else tf.gather(part, indices), inputs)


def range_data_of_source(x: Source | Epochs, given: Mapping[str, Any], steps_per_execution: int) -> RangeData:
    """Returns what `fit` trains on for a source, or for epochs.

    Args:
      x: the source or the epochs.
      given: the arguments that `fit` was given, by name.
      steps_per_execution: that of the model.

    Raises:
      ValueError: an argument does not go with them.
    """
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


def range_data_of_arrays(
    inputs: Any, batch_size: int, epochs: int, shuffle: Any, steps_per_execution: int
) -> RangeData | None:
    """Returns what `fit` trains on for arrays; None if they are better read on the client.

    Args:
      inputs: NumPy arrays, nested as a batch is, with None for the parts that it does not have.
      batch_size: the number of examples in a batch.
      epochs: the number of the last epoch, plus 1.
      shuffle: see `Model.fit`.
      steps_per_execution: that of the model.
    """
    found = [part for part in tf.nest.flatten(inputs) if part is not None]
    if shuffle not in (True, False) or sum(part.nbytes for part in found) > _LARGEST_ARRAYS or not len(found[0]):
        return None
    # Keras takes integers of NumPy, too.
    batch_size, epochs = operator.index(batch_size), operator.index(epochs)
    if epochs < 1:
        return None
    found_epochs = Epochs(arrays(*found), batch_size, epochs, _seed(shuffle), steps_per_execution)
    return RangeData(found_epochs, inputs, has_own_seed=bool(shuffle))


def _seed(shuffle: Any) -> int | None:
    if isinstance(shuffle, (bool, np.bool_)):
        # `keras.utils.set_random_seed` decides it.
        return random.randrange(2**31) if shuffle else None
    if not isinstance(shuffle, int):
        raise ValueError(f"shuffle must be True, False or a seed for a source, got {shuffle!r}.")
    return shuffle


def _spec_of_rows(part: Any) -> Any:
    return None if part is None else tf.TensorSpec([None, *part.shape[1:]], part.dtype)
