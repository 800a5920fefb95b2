"""A scope of Keras 3 in which the state of metrics is local, and every other variable is read once for all batches."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def stored_variable(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable of a Keras variable, in a stateless scope as well; None before it is created."""
    # Private: `value` is what the variable has in the scope.
    return variable._value


def compilation_of(model: keras.Model) -> Any:
    """Returns an object that is another one after each `compile` of a model."""
    # Private: a model's metrics may be its own, which stay.
    return model._loss_tracker


class VariableReads:
    """Reads variables in the function that is being traced, for functions that are traced inside of it.

    A read inside of a loop would go to the parameter server in each iteration.

    Args:
      stored: returns the TensorFlow variable to read in place of a Keras variable, or None.

    Attributes:
      is_incomplete: whether a variable was read that had not been created.
    """

    def __init__(self, stored: Callable[[keras.Variable], Any]) -> None:
        self.stored = stored
        self.is_incomplete = False
        self._graph = tf.compat.v1.get_default_graph()
        self._values: dict[int, Any] = {}

    def value_of(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable; zeros if it has not been created."""
        stored = self.stored(variable)
        if stored is None:
            self.is_incomplete = True
            return tf.zeros(variable.shape, variable.dtype)
        if id(variable) not in self._values:
            with self._graph.as_default():
                self._values[id(variable)] = tf.convert_to_tensor(stored)
        return self._values[id(variable)]


class EvaluationScope(keras.StatelessScope):
    """In it, some variables have values that can be changed, and all others have the values that `VariableReads` reads.

    Args:
      variables: the variables whose values can be changed.
      values: their values at the beginning, in the same order.
      reads: reads the other variables.

    Attributes:
      others: the names of the other variables that were assigned a value.
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[Any], reads: VariableReads) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self._reads = reads
        self._own = set(map(id, variables))
        self.others: list[str] = []

    # Keras calls this and the next when a variable is read and assigned.
    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable."""
        value = super().get_current_value(variable)
        return self._reads.value_of(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Sets the value of a variable."""
        if id(update[0]) not in self._own:
            self.others.append(update[0].path)
        super().add_update(update)

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the TensorFlow variable whose rows may be read in place of a variable's value; None if none may."""
        return None if id(variable) in self.state_mapping else self._reads.stored(variable)
