"""Adagrad with one accumulator for each row of a table."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from coordinator.ps_strategy.keras.internals.optimizers import variable_of


@keras.saving.register_keras_serializable("coordinator")
class RowwiseAdagrad(keras.optimizers.Optimizer):
    """An Adagrad optimizer whose accumulator of a row is the sum of the mean squares of the row's gradients.

        accumulator[i] += mean(gradient[i] ** 2)
        variable[i]    -= learning_rate * gradient[i] / (sqrt(accumulator[i]) + epsilon)

    The state is one number for each row. Adagrad's state is as large as the table, and Adam's is twice as large. The
    first dimension of a variable numbers the rows. In a vector, each element is a row. A scalar is one row. (Naumov et
    al., "Deep Learning Recommendation Model", arXiv 1906.00091; defaults as in TorchRec's `RowWiseAdagrad`.)

    A sparse gradient (`tf.IndexedSlices`) of a variable on a parameter server changes only the rows in the gradient.
    Gradient rows of the same index are summed first. A dense gradient changes all rows by the same formula.

    Args:
      learning_rate: a float, a `keras.optimizers.schedules.LearningRateSchedule`, or a function without arguments.
      initial_accumulator_value: the first value of accumulators, at least 0.
      epsilon: a positive number that is added to the root.
      name: the name of the optimizer.
      options: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
        `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps`: see `keras.optimizers.Optimizer`.

    Raises:
      ValueError: `initial_accumulator_value` is negative, or `epsilon` is not positive.
    """

    # Tells the strategy that the optimizer's effect on a row depends only on this row.
    updates_rows = True

    def __init__(
        self,
        learning_rate: Any = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
        name: str = "rowwise_adagrad",
        **options: Any,
    ) -> None:
        if not initial_accumulator_value >= 0:
            raise ValueError(f"initial_accumulator_value must be at least 0, got {initial_accumulator_value!r}.")
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {epsilon!r}.")
        super().__init__(learning_rate=learning_rate, name=name, **options)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, variables: Sequence[Any]) -> None:
        """Creates an accumulator for each variable, on the variable's server: a vector with one number per row."""
        if self.built:
            return
        super().build(variables)
        initializer, accumulators = keras.initializers.Constant(self.initial_accumulator_value), []
        for variable in variables:
            name = f"{getattr(variable, 'path', variable.name).replace('/', '_').replace(':', '_')}_accumulator"
            with tf.distribute.get_strategy().extended.colocate_vars_with(variable_of(variable)):
                accumulators.append(self.add_variable(variable.shape[:1], initializer, variable.dtype, name=name))
        self._accumulators = accumulators

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, or rows of it, with a dense gradient."""
        rate = ops.cast(learning_rate, variable.dtype)
        # With `Options(sparse_updates="dense")`, or without a strategy, `gradient` may be `tf.IndexedSlices`.
        gradient = tf.convert_to_tensor(ops.cast(gradient, variable.dtype))
        accumulator = self._accumulators[self._get_variable_index(variable)]
        in_a_row = tuple(range(1, len(gradient.shape)))
        self.assign_add(accumulator, ops.mean(ops.square(gradient), axis=in_a_row))
        root = ops.expand_dims(ops.sqrt(accumulator), in_a_row)
        self.assign_sub(variable, rate * gradient / (root + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which an equal optimizer can be created."""
        own = {"initial_accumulator_value": self.initial_accumulator_value, "epsilon": self.epsilon}
        return {**super().get_config(), **own}
