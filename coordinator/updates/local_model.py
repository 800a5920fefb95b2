"""The models that each worker trains itself: copies of the shared model, with an optimizer per worker.

No checkpoint contains them: the model on the parameter servers is what is saved.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import variable_of
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, operations_added
from coordinator.updates.gradient_optimizer import GradientOptimizer
from coordinator.updates.gradients import flat
from coordinator.updates.model import Model, make_per_worker
from coordinator.updates.rule_state import zeros

_logger = logging.getLogger("coordinator")


# More than the number of changes that a worker makes in one connection.
_CHANGES_OF_CONNECTION = 2**40


class LocalModel:
    """Per-worker copies of a model's variables, except its embeddings. Created in the strategy's scope.

    Scheduled functions read and change the copies of their own worker, without any transfer. On a new or restarted
    worker everything is zero: the owner fills the copies before they are read, and maintains `steps` and `version`.
    Each worker has an optimizer like the shared model's, with its own slots and count.

    Attributes:
      numbers: the positions of the copied variables in the model.
      variables: the copies, in that order: per-worker variables, each with the original's shape and dtype.
      steps: local steps since the copies were filled; a per-worker int64 scalar.
      version: the version of the shared model that the copies were filled from; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer) -> None:
        self.numbers = model.dense
        large = [model.variables[number].name for number in self.numbers if model.is_large(number)]
        if large and not model.are_embeddings_given:
            _logger.warning(
                "Each worker has a copy of %s, of more than 1 MB. If steps only look up rows there, pass it to the "
                "update rule in embeddings=. Otherwise pass embeddings= without it, and this is not reported.",
                ", ".join(large),
            )
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
        _assign(self.variables, values)

    def apply(self, gradients: Mapping[int, Any], rate: Any) -> None:
        """Updates the copies with the worker's optimizer. Gradients, by position, have no repeated rows."""
        if not gradients:
            return
        # Bias corrections need the worker's own count, since the slots are its own too.
        count = [variable.read_value() for variable in self._optimizer.scalars[:1]]
        variables = [self._by_number[number] for number in gradients]
        self._optimizer.apply(variables, list(gradients.values()), count, rate)
        self._optimizer.count()


class AveragedModel(LocalModel):
    """A worker's local model, and which of its changes are in the mean of all models.

        copies = base + what was changed since    change: what is being added to the mean, under `number`

    A change is *handed over* when it is copied to `change`. The servers are then told of it until they have counted it,
    and no other change is handed over before. So each change is counted once, even if a call is cut off anywhere.

    A mutex on each worker protects the copies from an abandoned call that still runs. If a call is cut off after it has
    changed a part of the model, the model is given up: it has no generation.

    Attributes:
      averaged_at: when the copies were last averaged or replaced, on the worker's clock, in seconds; a per-worker
        float64 scalar. `version` is the version of the shared model then.
      number: of the last change that was handed over; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer, lock_name: str) -> None:
        super().__init__(model, optimizer)
        originals = [model.originals[number] for number in self.numbers]
        with tf.variable_creator_scope(make_per_worker):
            self.averaged_at = zeros([], tf.float64, "averaged_at")
            self.number = zeros([], tf.int64, "change_number")
            self._counted = zeros([], tf.int64, "counted_number")
            self._base = [_copy_of(original) for original in originals]
            self._change = [_change_of(original) for original in originals]
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

    def replace(self, values: Sequence[Any], generation: Any) -> None:
        """Replaces the model by values in the order of `numbers`, and its generation, an int64 scalar; 0 for none."""
        with self._changed([*values, generation], generation):
            self.assign(values)
            _assign(self._base, values)
            self._counted.assign(self.number.read_value(), read_value=False)

    def is_counted(self) -> Any:
        """Returns whether the servers have counted all changes that were handed over, a bool scalar."""
        return tf.equal(self.number.read_value(), self._counted.read_value())

    def hand_over(self, values: Sequence[Any], connection: Any) -> None:
        """Hands over the change from `base` to some values; `connection` is the number of the worker's connection."""
        with self._changed([*values, connection]):
            for change, value, base in zip(self._change, values, self._base, strict=True):
                change.assign(tf.cast(value, change.dtype) - tf.cast(base.read_value(), change.dtype), read_value=False)
            _assign(self._base, values)
            # Greater than the numbers of older connections: a restarted worker does not know them.
            first = connection * _CHANGES_OF_CONNECTION
            self.number.assign(1 + tf.maximum(first, self.number.read_value()), read_value=False)

    def change(self) -> list[Any]:
        """Reads the last change that was handed over, in the order of `numbers`, in at least 32 bits."""
        return [change.read_value() for change in self._change]

    def record_counted(self) -> None:
        """Records that the servers have counted the last change."""
        self._counted.assign(self.number.read_value(), read_value=False)

    def move(self, mean: Sequence[Any]) -> None:
        """Moves the model from `base` to the mean, with what was changed since."""
        with self._changed(mean):
            for variable, base, value in zip(self.variables, self._base, mean, strict=True):
                # Exactly the mean, unless the model has changed.
                variable.assign(value + (variable.read_value() - base.read_value()), read_value=False)
            _assign(self._base, mean)

    def train(self, gradients: Mapping[int, Any], rate: Any, after: Any) -> None:
        """Applies gradients, by position, with a learning rate, once the tensor `after` is available."""
        with self._lock.hold([*flat(gradients), rate, after]):
            self.apply(gradients, rate)

    def record_averaged(self, version: Any, now: Any) -> None:
        """Records that the model is part of the shared model of this version."""
        self.version.assign(version, read_value=False)
        self.averaged_at.assign(now, read_value=False)

    @contextlib.contextmanager
    def _changed(self, after: Sequence[Any], generation: Any = None) -> Iterator[None]:
        """Opens a scope, under the mutex, that changes the model, and removes its generation until the end.

        None keeps the generation.
        """
        with self._lock.hold(after):
            generation = self._generation.read_value() if generation is None else generation
            with tf.control_dependencies([generation]):
                begun = self._generation.assign(tf.zeros([], tf.int64), read_value=False)
            with tf.control_dependencies([begun]), operations_added() as changes:
                yield
            with tf.control_dependencies(changes):
                self._generation.assign(generation, read_value=False)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value, read_value=False)


def _copy_of(original: Any) -> tf.Variable:
    variable = variable_of(original)
    return tf.Variable(
        lambda: tf.zeros(variable.shape, variable.dtype),
        # An optimizer changes the copy, but gradients are taken with respect to the original.
        trainable=False,
        constraint=original.constraint,
        name=f"local_{variable.name.partition(':')[0].replace('/', '_')}",
    )


def _change_of(original: Any) -> tf.Variable:
    variable = variable_of(original)
    dtype = variable.dtype if variable.dtype.size >= tf.float32.size else tf.float32
    return tf.Variable(lambda: tf.zeros(variable.shape, dtype), trainable=False, name="change")
