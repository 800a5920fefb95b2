"""The steps of a model as functions to schedule."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data import Source
from coordinator.ps_strategy.keras.evaluation.shard_functions import ShardFunctions
from coordinator.ps_strategy.keras.fit.range_data import RangeData, rows_at, weighted
from coordinator.ps_strategy.per_worker.variable import get_current_worker_index

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
