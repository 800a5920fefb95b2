"""What rounding took from the gradients that each worker has pushed: added to its next push (error feedback).

    push n     sent  = rounded(gradient + error)
               error = gradient + error - sent

It promises that what a worker has sent in all differs from the sum of its gradients by at most the rounding of its last
push. The errors of a new or restarted worker are zero; they are in no checkpoint.

(Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al., arXiv 1901.09847.)
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from coordinator.updates.state.local_model import make_per_worker
from coordinator.updates.state.rule_state import zeros
from coordinator.updates.transport.model import Model
from coordinator.updates.transport.rounding import is_rounded, rounded


class RoundingErrors:
    """The rounding errors of each worker. Created in the strategy's scope; used in scheduled functions.

    Args:
      model: whose dense gradients are rounded.
      are_kept: False to keep none: then gradients are as they are.

    Raises:
      ValueError: the shape of a variable is unknown.
    """

    def __init__(self, model: Model, *, are_kept: bool) -> None:
        self._dtype = model.transfer_dtype
        numbers = [number for number in range(len(model.variables)) if are_kept and model.is_rounded(number)]
        for variable in (model.variables[number] for number in numbers):
            if not variable.shape.is_fully_defined():
                raise ValueError(
                    f"error_feedback needs variables of known shapes: that of {variable.name!r} is {variable.shape}. "
                    "Create it with one, or list it in embeddings=, which are not rounded."
                )
        with tf.variable_creator_scope(make_per_worker):
            self._errors = {
                number: zeros(model.variables[number].shape.as_list(), tf.float32, "rounding_error")
                for number in numbers
            }

    def added_to(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Returns gradients, by the positions of their variables, with the errors of this worker's earlier pushes."""
        return {
            number: gradient + self._errors[number].read_value() if self._is_kept(number, gradient) else gradient
            for number, gradient in gradients.items()
        }

    def keep(self, gradients: Mapping[int, Any], not_finite: Any, accepted: Any) -> None:
        """Stores what rounding takes from the gradients of a push, unless it was rejected or is not finite.

        Args:
          gradients: those of `added_to`.
          not_finite: 1 if the push has a value that is not finite, otherwise 0; an int64 scalar.
          accepted: whether it is accepted; a bool, or a bool scalar.
        """
        for number, gradient in gradients.items():
            if self._is_kept(number, gradient):
                lost = gradient - tf.cast(rounded(gradient, self._dtype), gradient.dtype)
                self._assign_if(tf.logical_and(tf.equal(not_finite, 0), accepted), self._errors[number], lost)

    @staticmethod
    def _assign_if(condition: Any, error: tf.Variable, lost: Any) -> None:
        def assign() -> Any:
            error.assign(lost, read_value=False)
            return tf.no_op()

        tf.cond(condition, assign, tf.no_op)

    def _is_kept(self, number: int, gradient: Any) -> bool:
        return number in self._errors and is_rounded(gradient)
