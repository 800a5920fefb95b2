"""The functions that workers run for the steps of a model, on all their devices; a check that a model can run there."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, example_indices
from coordinator.ps_strategy.keras.internals.optimizers import is_optimizer, variable_of
from coordinator.ps_strategy.keras.internals.row_updates import is_table
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions
from coordinator.ps_strategy.per_worker.resource import get_current_worker_index
from coordinator.ps_strategy.tensorflow_internals.replicas import concatenated, divided, map_replica_values

Step = Callable[[Any], Any]


class ModelSteps:
    """Functions that run one or several steps of a model, each retraced only for new types of arguments.

    `step`, for example `model.train_step`, takes a batch, nested as the data is, and returns tensors. `steps_per_call`
    is the number of batches that `of_next` and `of_next_if_any` take from their iterator. If `step` is for evaluation,
    the functions of `shards` evaluate many batches each. `name` is for the dashboard and messages.
    """

    def __init__(
        self, step: Step, steps_per_call: int, shards: ShardFunctions | None = None, name: str | None = None
    ) -> None:
        self._step = step
        self._name = name or str(getattr(step, "__name__", "step"))
        self.steps_per_call = steps_per_call
        self.shards = shards
        # Both run a step with each of several batches. `last_of` returns the last result, `all_of` returns all results.
        self.last_of = self._function(lambda batches: self._all_of(batches)[-1], reduce_retracing=True)
        self.all_of = self._function(self._all_of, reduce_retracing=True)
        self.of_next = self._function(self._of_next, reduce_retracing=True)
        self.of_next_if_any = self._function(self._of_next_if_any, reduce_retracing=True)
        self._of_rows = self._function(self._steps_of_rows)
        # The latest source of `of_range`, two settings, and the function for them, which keeps the source alive.
        self._of_source: tuple[Source, int, Any, Any] | None = None
        # The latest source of `reading`, and the steps for it.
        self._reading: tuple[Source, ModelSteps] | None = None

    def reading(self, source: Source) -> "ModelSteps":
        """Returns steps that read a source; each batch is a range, or the result of the source's reader for a range."""
        if self._reading is None or self._reading[0] is not source:
            step = self._step
            steps = ModelSteps(lambda batch: step(source.read(batch)), self.steps_per_call, name=self._name)
            self._reading = source, steps
        return self._reading[1]

    def of_range(self, data: Any, positions: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function and its arguments; the function runs the steps of a range and returns the last result."""
        settings = data.epochs.settings
        # An array, because TensorFlow's cache of traces does not know NumPy numbers.
        batch_size = np.array(settings.batch_size)
        if data.copies is not None:
            return self._of_rows, (positions, batch_size, data.copies)
        source, batches, weights = data.epochs.source, settings.batches_per_range, data.class_weight
        if self._of_source is None or self._of_source[:3] != (source, batches, weights):

            def of_source(positions: Any, batch_size: Any) -> Any:
                extent = positions[0] if isinstance(positions, tuple) else positions
                return self._steps_of(weighted(source.read(positions), weights), extent, batch_size, batches)

            self._of_source = source, batches, weights, self._function(of_source)
        return self._of_source[3], (positions, batch_size)

    def _function(self, run: Callable[..., Any], *, reduce_retracing: bool = False) -> Any:
        """Returns a traced function that has the name of the step, which users know."""

        def named(*arguments: Any) -> Any:
            return run(*arguments)

        named.__name__ = self._name
        # Keras' own loop traces steps without AutoGraph, too.
        return tf.function(named, autograph=False, reduce_retracing=reduce_retracing)

    def _steps_of_rows(self, positions: Any, batch_size: Any, inputs: Any) -> Any:
        # A missing part of the batches is None.
        first = next(part for part in tf.nest.flatten(inputs) if part is not None)
        size = tf.raw_ops.VariableShape(input=first.handle, out_type=tf.int64)[0]
        indices = example_indices(positions, size)
        examples = tf.nest.map_structure(lambda part: None if part is None else tf.gather(part, indices), inputs)
        return self._steps_of(examples, positions, batch_size, self.steps_per_call)

    def _steps_of(self, examples: Any, positions: Any, batch_size: Any, batches: int) -> Any:
        if batches == 1:
            return self._step(examples)
        step = tf.function(self._step, autograph=False)
        outputs = None
        for first in [number * batch_size for number in range(batches)]:

            def run(first: Any = first) -> Any:
                rows = slice(first, first + batch_size)
                return step(tf.nest.map_structure(lambda part: None if part is None else part[rows], examples))

            outputs = run() if outputs is None else tf.cond(first < positions[2], run, lambda last=outputs: last)
        return outputs

    def _repeatable(self, times: int) -> Step:
        return self._step if times == 1 else tf.function(self._step, autograph=False)

    def _all_of(self, batches: Sequence[Any]) -> list[Any]:
        step = self._repeatable(len(batches))
        return [step(batch) for batch in batches]

    def _of_next(self, iterator: Any) -> Any:
        """Runs steps with the next batches and returns the last result.

        Raises `tf.errors.OutOfRangeError` if fewer than `steps_per_call` batches are left.
        """
        step = self._repeatable(self.steps_per_call)
        return [step(next(iterator)) for _ in range(self.steps_per_call)][-1]

    def _of_next_if_any(self, iterator: Any) -> tuple[Any, Any, Any]:
        """Runs steps with the next batches, fewer than `steps_per_call` if the data ends.

        Returns the number of batches, an int32 scalar; the worker's index; and the last result, or zeros for no batch.
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


def weighted(batch: Any, class_weight: Sequence[tuple[int, float]]) -> Any:
    """Returns a batch with sample weights by the class of each example. The weight of an unlisted class is 1.

    `class_weight` has pairs of a class and its weight; if it is empty, the batch is unchanged. The batch is `(x, y)`,
    in which `y` has a class number for each example, or a value for each class. Other batches raise ValueError.
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


def on_replicas(step: Step, strategy: Any) -> Step:
    """Returns a step that runs on each replica of a worker, with a part of the batch.

    The step has the same effect as on one device, because Keras divides the loss of each replica by the number of
    replicas, and sums the replicas' gradients. `tf.distribute.MirroredStrategy` works the same way. If a batch cannot
    be divided evenly, the examples of the smaller parts have a larger weight.

    The returned function takes a batch, which it divides, or a batch of `PerReplica` values. It returns the mean of the
    replicas' results if these are floating-point numbers, otherwise the result of the first replica.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return step

    def combined(value: Any) -> Any:
        parts = strategy.experimental_local_results(value)
        if len(parts) == 1 or not (isinstance(parts[0], tf.Tensor) and parts[0].dtype.is_floating):
            return parts[0]
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)

    @functools.wraps(step)
    def replicated(batch: Any) -> Any:
        return map_replica_values(combined, strategy.run(step, args=(divided(batch, replicas),)))

    return replicated


def whole(batch: Any) -> Any:
    """Returns a batch of `PerReplica` values in one piece, for a step that runs on a single device of the worker."""
    return map_replica_values(lambda part: concatenated(part, 0), batch)


def check_model(model: keras.Model) -> None:
    """Raises ValueError if the model runs eagerly, is compiled by XLA, or has variables off the parameter servers."""
    if model.run_eagerly:
        raise ValueError(
            "run_eagerly=True: workers run traced functions, they have no Python. Compile the model without it; to "
            "debug a step, call model.train_step(batch) of a model that was made without a strategy."
        )
    # The optimizers are `model.optimizer`, and others that the model has as attributes or in lists, for a custom step.
    values = [value if isinstance(value, (list, tuple)) else [value] for value in vars(model).values()]
    optimizers = [value for value in itertools.chain.from_iterable(values) if is_optimizer(value)]
    variables = [*model.variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
    holds = model.distribute_strategy.extended.holds
    elsewhere = [variable.path for variable in variables if not is_table(variable) and not holds(variable_of(variable))]
    if elsewhere:
        raise ValueError(
            f"{len(elsewhere)} variables of model {model.name!r} are not on parameter servers, {elsewhere[0]!r} among "
            "them. Make the model, its optimizer and its metrics, and compile it, inside `with strategy.scope():`."
        )
    # Checked last: if this process sees a GPU, Keras itself chooses XLA for a model created outside of the scope.
    if model.jit_compile:
        raise ValueError(
            "jit_compile=True: XLA compiles functions for one device, and a step uses variables on parameter servers. "
            "Compile the model without it."
        )
