"""The training step of a model on all devices of a worker: each computes on a part of the batch.

A step on several replicas equals one on a single device: Keras divides the loss of each by their number, and sums what
they want to change. So it does by `tf.distribute.MirroredStrategy`. Batches that cannot be divided evenly give the
examples of the smaller parts a larger weight.
"""

import functools
import json
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data import Epochs, Source, arrays
from coordinator.data.source import example_indices
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions
from coordinator.ps_strategy.per_worker.resource import get_current_worker_index
from coordinator.ps_strategy.tensorflow_internals.replicas import concatenated, divided, map_replica_values

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


Step = Callable[[Any], Any]


class ModelSteps:
    """Functions that run one or several steps of a model, each retraced only for new types of arguments.

    Args:
      step: takes a batch, nested as the data is, and returns tensors: `model.train_step`, `test_step`, `predict_step`.
      steps_per_call: number of batches that `of_next` and `of_next_if_any` take from their iterator.
      shards: of `test_step`: evaluate many batches each, and leave the metrics as they are.
      name: of all the functions, on the dashboard and in messages; by default that of `step`.
    """

    def __init__(
        self, step: Step, steps_per_call: int, shards: ShardFunctions | None = None, name: str | None = None
    ) -> None:
        self._step = step
        self._name = name or str(getattr(step, "__name__", "step"))
        self.steps_per_call = steps_per_call
        self.shards = shards
        self.last_of = self._function(self._last_of, reduce_retracing=True)
        self.all_of = self._function(self._all_of, reduce_retracing=True)
        self.of_next = self._function(self._of_next, reduce_retracing=True)
        self.of_next_if_any = self._function(self._of_next_if_any, reduce_retracing=True)
        self._of_rows = self._function(self._steps_of_rows)
        # Of the source that was used last, which the functions keep alive.
        self._of_source: tuple[Source, int, Any, Any] | None = None
        self._reading: tuple[Source, ModelSteps] | None = None

    def reading(self, source: Source) -> "ModelSteps":
        """Returns the steps of what a source reads: a batch is a range, or what came with it."""
        if self._reading is None or self._reading[0] is not source:
            step = self._step
            steps = ModelSteps(lambda given: step(source.read(given)), self.steps_per_call, name=self._name)
            self._reading = source, steps
        return self._reading[1]

    def of_range(self, data: RangeData, positions: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function that runs the steps of a range and returns the result of the last; and its arguments."""
        settings = data.epochs.settings
        # An array, since a NumPy number is not known to the cache of traces.
        batch_size = np.array(settings.batch_size)
        if data.copies is not None:
            return self._of_rows, (positions, batch_size, data.copies)
        source, batches = data.epochs.source, settings.batches_per_range
        weights = data.class_weight
        if self._of_source is None or self._of_source[:3] != (source, batches, weights):

            def of_source(positions: Any, batch_size: Any) -> Any:
                extent = positions[0] if isinstance(positions, tuple) else positions
                return self._steps_of(weighted(source.read(positions), weights), extent, batch_size, batches)

            self._of_source = source, batches, weights, self._function(of_source)
        return self._of_source[3], (positions, batch_size)

    def _function(self, run: Callable[..., Any], *, reduce_retracing: bool = False) -> Any:
        """Returns a function by the name of the step, which its users know."""

        def named(*arguments: Any) -> Any:
            return run(*arguments)

        named.__name__ = self._name
        # Without AutoGraph, as Keras' own loop traces its steps and those that override them.
        return tf.function(named, autograph=False, reduce_retracing=reduce_retracing)

    def _steps_of_rows(self, positions: Any, batch_size: Any, inputs: Any) -> Any:
        return self._steps_of(rows_at(inputs, positions), positions, batch_size, self.steps_per_call)

    def _steps_of(self, examples: Any, positions: Any, batch_size: Any, batches: int) -> Any:
        """Runs a step with each batch of a range, which has up to `batches`, and returns the result of the last."""
        if batches == 1:
            return self._step(examples)
        step = tf.function(self._step, autograph=False)
        outputs = None
        for first in [number * batch_size for number in range(batches)]:

            def run(first: Any = first) -> Any:
                return step(tf.nest.map_structure(lambda part: _rows(part, first, batch_size), examples))

            outputs = run() if outputs is None else tf.cond(first < positions[2], run, lambda last=outputs: last)
        return outputs

    def _repeatable(self, times: int) -> Step:
        """Returns the step, as a function if it is called several times, so that it is traced once."""
        return self._step if times == 1 else tf.function(self._step, autograph=False)

    def _all_of(self, batches: Sequence[Any]) -> list[Any]:
        """Runs a step with each of the batches and returns the results of all."""
        step = self._repeatable(len(batches))
        return [step(batch) for batch in batches]

    def _last_of(self, batches: Sequence[Any]) -> Any:
        """Runs a step with each of the batches and returns the result of the last."""
        return self._all_of(batches)[-1]

    def _of_next(self, iterator: Any) -> Any:
        """Runs steps with the next batches and returns the result of the last.

        Raises:
          tf.errors.OutOfRangeError: fewer than `steps_per_call` batches are left.
        """
        step = self._repeatable(self.steps_per_call)
        return [step(next(iterator)) for _ in range(self.steps_per_call)][-1]

    def _of_next_if_any(self, iterator: Any) -> tuple[Any, Any, Any]:
        """Runs steps with the next batches, fewer than `steps_per_call` if the data ends.

        Returns:
          The number of batches, an int32 scalar; the index of the worker; and the result of the last step, zeros if
          there was none.
        """
        step = tf.function(self._step, autograph=False)
        spec = step.get_concrete_function(iterator.element_spec).structured_outputs
        count: Any = tf.constant(0)
        outputs = tf.nest.map_structure(lambda output: tf.zeros([n or 0 for n in output.shape], output.dtype), spec)
        for _ in range(self.steps_per_call):
            batch = iterator.get_next_as_optional()
            count, outputs = tf.cond(
                batch.has_value(),
                lambda count=count, batch=batch: (count + 1, step(batch.get_value())),
                lambda count=count, outputs=outputs: (count, outputs),
            )
        return count, get_current_worker_index(), outputs


def _rows(part: Any, first: Any, count: Any) -> Any:
    return None if part is None else part[first : first + count]


def on_replicas(step: Step, strategy: Any) -> Step:
    """Returns a step that runs on each replica of a worker.

    Args:
      step: takes a batch, or the part of a batch, nested as the data is, and returns tensors.
      strategy: the strategy.

    Returns:
      A function that takes a batch, which it divides, or one of `PerReplica` values. It returns the mean of what the
      replicas return, and what the first returns where that is no floating-point number.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return step

    @functools.wraps(step)
    def replicated(batch: Any) -> Any:
        outputs = strategy.run(step, args=(divided(batch, replicas),))
        return map_replica_values(functools.partial(_combined, strategy), outputs)

    return replicated


def _combined(strategy: Any, value: Any) -> Any:
    parts = strategy.experimental_local_results(value)
    if len(parts) == 1 or not (isinstance(parts[0], tf.Tensor) and parts[0].dtype.is_floating):
        return parts[0]
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)


def whole(batch: Any) -> Any:
    """Returns a batch of `PerReplica` values in one piece, for a step that runs on a single device of the worker."""
    return map_replica_values(lambda part: concatenated(part, 0), batch)
