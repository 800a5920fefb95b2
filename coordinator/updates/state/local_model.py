"""The models that each worker trains itself: copies of the shared one, with an optimizer per worker.

Nothing here is in a checkpoint: what is worth saving of a model is on the parameter servers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals import optimizers as keras_optimizers
from coordinator.ps_strategy.keras.internals.optimizers import variable_of
from coordinator.updates.gradient_optimizer import GradientOptimizer, KerasOptimizer, gradient_optimizer
from coordinator.updates.state.rule_state import zeros
from coordinator.updates.state.server_mutex import ServerMutex
from coordinator.updates.transport.gradients import flat
from coordinator.updates.transport.model import Model


class LocalModel:
    """Per-worker copies of some of a model's variables.

    It is used in scheduled functions, where it means the copies of the worker that runs them, without any transfer. On
    a new or restarted worker everything is zero: the owner fills the copies before they are read, and maintains `steps`
    and `version`. Created in the strategy's scope.

    Args:
      model: the variables.
      numbers: the positions of those that are copied.
      optimizer: a Keras 3 optimizer, of which each worker gets one with its own slots and count; or a function
        `(variable, gradient, learning_rate)`.
      learning_rate: for a function: a number or a scalar `tf.Variable`.

    Attributes:
      numbers: as given.
      variables: the copies, in that order: per-worker variables, each with the original's shape and dtype.
      steps: local steps since the copies were filled; a per-worker int64 scalar.
      version: of the shared model that the copies were filled from; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, numbers: Sequence[int], optimizer: Any, learning_rate: Any = None) -> None:
        self.numbers = tuple(numbers)
        originals = [model.originals[number] for number in self.numbers]
        self._shared = gradient_optimizer(optimizer, model.originals, learning_rate)
        with tf.variable_creator_scope(_make_per_worker):
            self.steps = zeros([], tf.int64, "local_steps")
            self.version = zeros([], tf.int64, "pulled_version")
            self.variables = [_copy_of(original) for original in originals]
            self._own = self._shared
            if keras_optimizers.is_optimizer(optimizer):
                self._own = _own_optimizer(optimizer, originals, self.variables)
        self._by_number = dict(zip(self.numbers, self.variables, strict=True))

    def values(self) -> dict[int, Any]:
        """Reads the copies, by position in the model."""
        return {number: variable.read_value() for number, variable in self._by_number.items()}

    def assign(self, values: Mapping[int, Any]) -> None:
        """Replaces copies, by position in the model; the optimizer's slots stay."""
        for number, value in values.items():
            self._by_number[number].assign(value, read_value=False)

    def apply(self, gradients: Mapping[int, Any], rate: Any = None) -> None:
        """Has the worker's optimizer update its copies.

        Args:
          gradients: by position in the model: tensors, or `tf.IndexedSlices` without repeated indices.
          rate: the learning rate, a float32 scalar. None takes the optimizer's: that of its schedule for the number of
            local updates, or the value of its variable on the parameter server.
        """
        if not gradients:
            return
        # Bias corrections need the count of the worker's own updates, since the slots are its own too.
        scalars = [variable.read_value() for variable in self._own.scalars[:1]]
        if rate is None:
            rest = [variable.read_value() for variable in self._shared.scalars[1:]]
            rate = self._shared.learning_rate([*scalars, *rest])
        self._own.apply([self._by_number[number] for number in gradients], list(gradients.values()), scalars, rate)
        self._own.count()


class AveragedModel:
    """A worker's local model that is averaged with those of other workers.

    A mutex on each worker protects it: an abandoned call that still runs never changes it concurrently. Created in the
    strategy's scope, used in scheduled functions.

    Args:
      model: the copies.
      lock_name: of the mutex on each worker.

    Attributes:
      numbers: the positions of its variables in the shared model.
      version: of the shared model at the last averaging or pull; a per-worker int64 scalar.
      averaged_at: when that was, on the worker's clock, in seconds; a per-worker float64 scalar.
    """

    def __init__(self, model: LocalModel, lock_name: str) -> None:
        self.numbers, self.version = model.numbers, model.version
        with tf.variable_creator_scope(_make_per_worker):
            self.averaged_at = zeros([], tf.float64, "averaged_at")
            # 0 on a new or restarted worker; see `AveragingControl`.
            self._generation = zeros([], tf.int64, "generation")
        self.model = model
        self._lock = ServerMutex(lock_name, "")

    def is_of(self, generation: Any) -> Any:
        """Returns whether the model is of this generation, a bool scalar."""
        return tf.equal(generation, self._generation.read_value())

    def read(self) -> list[Any]:
        """Returns the values, in the order of `numbers`."""
        with self._lock.hold():
            return list(self.model.values().values())

    def replace(self, values: Sequence[Any], generation: Any, version: Any, now: Any) -> None:
        """Replaces the model; all arguments are on the worker.

        Args:
          values: in the order of `numbers`.
          generation: the new one, an int64 scalar; 0 for none.
          version: of the shared model that the values are from, an int64 scalar.
          now: the time, a float64 scalar.
        """
        with self._lock.hold([*values, generation, version, now]):
            self.model.assign(dict(zip(self.numbers, values, strict=True)))
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
        with self._lock.hold([*flat(gradients, list(gradients)), rate, *values, *averages, is_averaged]):

            def move() -> Any:
                current = self.model.values()
                moved = {
                    # Exactly the average, unless an abandoned call has changed the model meanwhile.
                    number: average + (current[number] - value)
                    for number, value, average in zip(self.numbers, values, averages, strict=True)
                }
                self.model.assign(moved)
                return tf.no_op()

            tf.cond(is_averaged, move, tf.no_op)
            if gradients:
                self.model.apply(gradients, rate)


def _make_per_worker(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
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


def _own_optimizer(optimizer: Any, originals: Sequence[Any], copies: Sequence[Any]) -> GradientOptimizer:
    """Clones a Keras optimizer for the copies, in its initial state; the current scope places its variables."""
    # The learning rate is always passed, so a schedule that Keras cannot clone need not be cloned.
    own = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.0})
    exempt = keras_optimizers.exempt_from_weight_decay(optimizer, originals)
    own.exclude_from_weight_decay(var_list=[copies[number] for number in exempt])
    return KerasOptimizer(own, copies)
