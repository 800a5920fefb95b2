"""What a rule needs of a model's `train_step`: its gradients, and to run it again without a trace of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from coordinator.ps_strategy.keras.internals.evaluation_scope import stored_variable
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced


@contextlib.contextmanager
def gradients_captured(optimizer: keras.optimizers.Optimizer) -> Iterator[list[tuple[Any, Any]]]:
    """A scope in which an optimizer collects what it is given, and applies nothing.

    Its value is a list with a pair of gradients and variables for each call of `apply` or `apply_gradients`.
    """
    captured: list[tuple[Any, Any]] = []

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        captured.append((list(grads), list(trainable_variables or optimizer._trainable_variables)))

    # `apply_gradients` calls `apply`, before any clipping, which is the rule's.
    with attribute_replaced(optimizer, "apply", apply):
        yield captured


class RepeatedStepScope(keras.StatelessScope):
    """In it, a step leaves metrics, seeds and statistics as they are; it reads all variables as before."""

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the TensorFlow variable whose rows may be read; None for one that the step has assigned."""
        return None if id(variable) in self.state_mapping else stored_variable(variable)
