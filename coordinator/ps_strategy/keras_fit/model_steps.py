"""A step of a model as functions that workers run, of one or of several batches at a call."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Step = Callable[[Any], Any]


class ModelSteps:
    """Functions to schedule, each traced once for each type of what it takes.

    Args:
      step: takes a batch, nested as the data is, and returns tensors: `model.train_step`, `test_step`, `predict_step`.
      steps_per_call: how many batches a function takes that is given no batches but an iterator.
    """

    def __init__(self, step: Step, steps_per_call: int) -> None:
        self._step = step
        self.steps_per_call = steps_per_call
        # Keras' code is not for AutoGraph, nor are steps that override it: in Keras' own loop they are called so too.
        function = tf.function(autograph=False, reduce_retracing=True)
        self.last_of = function(self._last_of)
        self.all_of = function(self._all_of)
        self.of_next = function(self._of_next)
        self.of_next_if_any = function(self._of_next_if_any)

    def _repeatable(self, times: int) -> Step:
        """The step; one that is to be called several times is a function, so that it is traced once."""
        return self._step if times == 1 else tf.function(self._step, autograph=False)

    def _all_of(self, batches: Sequence[Any]) -> list[Any]:
        """A step with each of the batches: what each of them returns."""
        step = self._repeatable(len(batches))
        return [step(batch) for batch in batches]

    def _last_of(self, batches: Sequence[Any]) -> Any:
        """A step with each of the batches: what the last of them returns."""
        return self._all_of(batches)[-1]

    def _of_next(self, iterator: Any) -> Any:
        """Steps with the next batches: what the last of them returns.

        Raises:
          tf.errors.OutOfRangeError: there are not so many left.
        """
        step = self._repeatable(self.steps_per_call)
        return [step(next(iterator)) for _ in range(self.steps_per_call)][-1]

    def _of_next_if_any(self, iterator: Any) -> tuple[Any, Any]:
        """Steps with the next batches, as long as there are any.

        Returns:
          How many there were, an int32 scalar; and what the last step returned, if there was one.
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
        return count, outputs
