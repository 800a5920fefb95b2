"""The models that each worker trains itself: copies of the shared one, with an optimizer per worker.

Nothing here is in a checkpoint: what is worth saving of a model is on the parameter servers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.parts import variable_of
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex
from coordinator.updates.gradient_optimizer import GradientOptimizer
from coordinator.updates.state.rule_state import zeros
from coordinator.updates.transport.gradients import flat
from coordinator.updates.transport.model import Model

_logger = logging.getLogger("coordinator")


class LocalModel:
    """Per-worker copies of a model's variables, except its embeddings.

    It is used in scheduled functions, where it means the copies of the worker that runs them, without any transfer. On
    a new or restarted worker everything is zero: the owner fills the copies before they are read, and maintains `steps`
    and `version`. Created in the strategy's scope.

    Args:
      model: the shared model.
      optimizer: that of the shared model; each worker gets one of its kind, with its own slots and count.

    Attributes:
      numbers: the positions of the copied variables in the model.
      variables: the copies, in that order: per-worker variables, each with the original's shape and dtype.
      steps: local steps since the copies were filled; a per-worker int64 scalar.
      version: of the shared model that the copies were filled from; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer) -> None:
        self.numbers = model.dense
        _report_large(model)
        originals = [model.originals[number] for number in self.numbers]
        with tf.variable_creator_scope(make_per_worker):
            self.steps = zeros([], tf.int64, "local_steps")
            self.version = zeros([], tf.int64, "pulled_version")
            self.variables = [_copy_of(original) for original in originals]
            self._optimizer = optimizer.for_copies(originals, self.variables)
        self._by_number = dict(zip(self.numbers, self.variables, strict=True))

    def values(self) -> list[Any]:
        """Reads the copies."""
        return [variable.read_value() for variable in self.variables]

    def assign(self, values: Sequence[Any]) -> None:
        """Replaces the copies; the optimizer's slots stay."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value, read_value=False)

    def apply(self, gradients: Mapping[int, Any], rate: Any) -> None:
        """Has the worker's optimizer update its copies.

        Args:
          gradients: by position in the model: tensors, or `tf.IndexedSlices` without repeated indices.
          rate: the learning rate, a float32 scalar.
        """
        if not gradients:
            return
        # Bias corrections need the count of the worker's own updates, since the slots are its own too.
        count = [variable.read_value() for variable in self._optimizer.scalars[:1]]
        variables = [self._by_number[number] for number in gradients]
        self._optimizer.apply(variables, list(gradients.values()), count, rate)
        self._optimizer.count()


class AveragedModel(LocalModel):
    """A worker's local model that is averaged with those of other workers.

    A mutex on each worker protects the copies: an abandoned call that still runs never changes them concurrently.

    Args:
      model, optimizer: see `LocalModel`.
      lock_name: of the mutex on each worker.

    Attributes:
      averaged_at: when the copies were last averaged or replaced, on the worker's clock, in seconds; a per-worker
        float64 scalar. `version` is that of the shared model then.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer, lock_name: str) -> None:
        super().__init__(model, optimizer)
        with tf.variable_creator_scope(make_per_worker):
            self.averaged_at = zeros([], tf.float64, "averaged_at")
            # 0 on a new or restarted worker; see `AveragingControl`.
            self._generation = zeros([], tf.int64, "generation")
        self._lock = ServerMutex(lock_name, "")

    def is_of(self, generation: Any) -> Any:
        """Returns whether the model is of this generation, a bool scalar."""
        return tf.equal(generation, self._generation.read_value())

    def read(self) -> list[Any]:
        """Reads the copies, under the mutex."""
        with self._lock.hold():
            return self.values()

    def replace(self, values: Sequence[Any], generation: Any, version: Any, now: Any) -> None:
        """Replaces the model; all arguments are on the worker.

        Args:
          values: in the order of `numbers`.
          generation: the new one, an int64 scalar; 0 for none.
          version: of the shared model that the values are from, an int64 scalar.
          now: the time, a float64 scalar.
        """
        with self._lock.hold([*values, generation, version, now]):
            self.assign(values)
            self._generation.assign(generation, read_value=False)
        self.record_averaged(version, now)

    def record_averaged(self, version: Any, now: Any) -> None:
        """Records that the model is part of the shared model of this version."""
        self.version.assign(version, read_value=False)
        self.averaged_at.assign(now, read_value=False)

    def train(
        self, gradients: Mapping[int, Any], rate: Any, values: Sequence[Any], averages: Sequence[Any], is_averaged: Any
    ) -> None:
        """Adds the difference of the mean and the averaged values to the model, then applies gradients.

        Args:
          gradients: by the positions of their variables.
          rate: the learning rate, a float32 scalar.
          values: those that were averaged.
          averages: the mean.
          is_averaged: whether there is a mean, a bool scalar.
        """

        def move() -> Any:
            # Exactly the average, unless an abandoned call has changed the model meanwhile.
            moved = zip(averages, self.values(), values, strict=True)
            self.assign([average + (current - value) for average, current, value in moved])
            return tf.no_op()

        with self._lock.hold([*flat(gradients), rate, *values, *averages, is_averaged]):
            tf.cond(is_averaged, move, tf.no_op)
            self.apply(gradients, rate)


def _report_large(model: Model) -> None:
    """Logs which variables are copied although they may be meant for looking up rows."""
    large = [model.variables[number].name for number in model.dense if model.is_large(number)]
    if large and not model.are_embeddings_given:
        _logger.warning(
            "Each worker has a copy of %s, of more than 1 MB. If steps only look up rows there, pass it to the update "
            "rule in embeddings=. Otherwise pass embeddings= without it, and this is not reported.",
            ", ".join(large),
        )


def make_per_worker(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates a variable of which each worker has its own; for `tf.variable_creator_scope`."""
    return next_creator(**kwargs, per_worker_variable=True)


def _copy_of(original: Any) -> tf.Variable:
    variable = variable_of(original)
    return tf.Variable(
        lambda: tf.zeros(variable.shape, variable.dtype),
        # An optimizer changes the copy, but gradients are taken with respect to the original.
        trainable=False,
        constraint=original.constraint,
        name=f"local_{variable.name.partition(':')[0].replace('/', '_')}",
    )
