"""A copy of a model on each worker, which the worker changes by itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import keras_internals
from coordinator.ps_strategy.keras_internals import variable_of
from coordinator.updates.gradient_optimizer import GradientOptimizer, KerasOptimizer, gradient_optimizer
from coordinator.updates.transport.model import Model


class LocalModel:
    """Each worker's own copies of some of a model's variables, with an optimizer of its own.

    It is used in scheduled functions, where it stands for the copies of the worker that runs them: nothing in it goes
    over the network. On a worker that is new or was restarted the copies are zero, and so are `steps`: whoever keeps a
    local model fills it there before anybody reads it, and counts in `steps` from then on.

    It is in no checkpoint: what is worth keeping of a model is on the parameter servers.

    Args:
      model: the variables.
      numbers: the positions of those that are copied.
      optimizer: a Keras 3 optimizer, of which each worker gets one with slots and a count of its own; or a function
        `(variable, gradient, learning_rate)`.
      learning_rate: for a function: a number or a scalar `tf.Variable`.

    Attributes:
      numbers: as given.
      variables: those of the copies, in that order: per-worker variables, each with the original's shape and dtype.
      steps: for the owner to count in: local steps since the copies were filled; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, numbers: Sequence[int], optimizer: Any, learning_rate: Any = None) -> None:
        self.numbers = tuple(numbers)
        originals = [model.originals[number] for number in self.numbers]
        self._shared = gradient_optimizer(optimizer, model.originals, learning_rate)
        with tf.variable_creator_scope(_per_worker):
            self.steps = tf.Variable(lambda: tf.zeros([], tf.int64), trainable=False, name="local_steps")
            self.variables = [_copy_of(original) for original in originals]
            self._own = self._shared
            if keras_internals.is_optimizer(optimizer):
                self._own = _own_optimizer(optimizer, originals, self.variables)
        self._by_number = dict(zip(self.numbers, self.variables, strict=True))

    def values(self) -> dict[int, Any]:
        """The copies' values, by position in the model."""
        return {number: variable.read_value() for number, variable in self._by_number.items()}

    def assign(self, values: Mapping[int, Any]) -> None:
        """Replaces copies, by position in the model; the optimizer's slots stay."""
        for number, value in values.items():
            self._by_number[number].assign(value, read_value=False)

    def apply(self, gradients: Mapping[int, Any], rate: Any = None) -> None:
        """Has the worker's own optimizer change its own copies.

        Args:
          gradients: by position in the model: tensors, or `tf.IndexedSlices` without repeated indices.
          rate: the learning rate, a float32 scalar. None takes the one that the optimizer has now: that of its
            schedule for the number of local updates, or the value of its variable on the parameter server.
        """
        if not gradients:
            return
        # The count of updates is the worker's own, which a shared one would be no good for: its slots are its own too.
        scalars = [variable.read_value() for variable in self._own.scalars[:1]]
        if rate is None:
            rest = [variable.read_value() for variable in self._shared.scalars[1:]]
            rate = self._shared.learning_rate([*scalars, *rest])
        self._own.apply([self._by_number[number] for number in gradients], list(gradients.values()), scalars, rate)
        self._own.count()

    def __repr__(self) -> str:
        return f"<LocalModel: {len(self.variables)} variables, {self._own!r}>"


def _per_worker(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    return next_creator(**kwargs, per_worker_variable=True)


def _copy_of(original: Any) -> tf.Variable:
    variable = variable_of(original)
    return tf.Variable(
        lambda: tf.zeros(variable.shape, variable.dtype),
        # A copy is changed by an optimizer, but the gradients are those of the original.
        trainable=False,
        constraint=original.constraint,
        name=f"local_{variable.name.partition(':')[0].replace('/', '_')}",
    )


def _own_optimizer(optimizer: Any, originals: Sequence[Any], copies: Sequence[Any]) -> GradientOptimizer:
    """The same Keras optimizer for the copies, in its initial state; the scope around says where its variables are."""
    # The learning rate is always given, so a schedule that Keras could not make again need not be.
    own = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.0})
    exempt = keras_internals.exempt_from_weight_decay(optimizer, originals)
    own.exclude_from_weight_decay(var_list=[copies[number] for number in exempt])
    return KerasOptimizer(own, copies)
