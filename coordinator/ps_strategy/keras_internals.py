"""The one door to what Keras 3 keeps to itself.

Each use below says in a line why no public name serves; `tests/ps_strategy/test_keras_internals.py` fails loudly when
Keras changes one of them.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def is_optimizer(value: Any) -> bool:
    """Whether this is an optimizer of Keras 3."""
    return isinstance(value, keras.optimizers.Optimizer)


def scalar_variables(optimizer: Any) -> list[tf.Variable]:
    """The count of updates, and the learning rate if it is a variable: both as TensorFlow variables."""
    # Private: `optimizer.learning_rate` tells the value, not whether a variable is behind it.
    rate = optimizer._learning_rate
    return [optimizer._iterations.value, *([rate.value] if isinstance(rate, keras.Variable) else [])]


def learning_rate(optimizer: Any, scalars: Sequence[Any]) -> Any:
    """The learning rate for given values of `scalar_variables`, a float32 scalar."""
    # Private: `optimizer.learning_rate` would read the variables where they are.
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return tf.cast(scalars[1], tf.float32)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return tf.cast(rate(scalars[0]), tf.float32)
    return tf.cast(rate() if callable(rate) else rate, tf.float32)


def view_for_variables(optimizer: Any, variables: Sequence[Any], scalars: Sequence[Any], rate: Any) -> Any:
    """The same optimizer as it is to update some of its variables, on their server and for one gradient.

    Its `apply` uses the given learning rate and count of updates, and counts nothing.

    Args:
      optimizer: a built Keras 3 optimizer.
      variables: those of its variables that will be updated.
      scalars: the values of `scalar_variables`.
      rate: the learning rate, a float scalar.
    """
    # `copy.copy` would save and load it.
    view = object.__new__(type(optimizer))
    # Private: an optimizer takes the learning rate and the count from variables of its own, which all its users share;
    # and it keeps the moving averages of all variables in a list.
    view.__dict__.update(optimizer.__dict__)
    view.__dict__.update(
        _learning_rate=rate,
        _iterations=_Iterations(scalars[0]),
        global_clipnorm=None,
        _trainable_variables=[*variables],
    )
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        view.__dict__["_model_variables_moving_average"] = [
            averages[optimizer._get_variable_index(variable)] for variable in variables
        ]
    return view


class _Iterations:
    """Stands for an optimizer's count of updates, with a value that does not change."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype = value.dtype.name

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self._value if dtype is None else tf.cast(self._value, dtype)

    def __add__(self, other: Any) -> Any:
        return self._value + other

    def __mod__(self, other: Any) -> Any:
        return self._value % other

    def assign_add(self, value: Any) -> None:
        """Counts nothing: the update is counted once, by whoever makes it."""
