"""A Keras 3 optimizer for single rows that belong to no variable which Keras knows: those of a table."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import product_of_momenta, view_for_variables
from coordinator.ps_strategy.keras.internals.parts import variable_of
from coordinator.ps_strategy.keras.internals.row_updates import updates_rows
from coordinator.ps_strategy.keras.internals.stand_ins import Rows, StandIn

_NOT_SLOTS = ("_variables", "_trainable_variables", "_model_variables_moving_average")


class RowOptimizer:
    """Applies an elementwise optimizer of Keras 3, or one with `updates_rows = True`, to given rows and their slots.

    It uses a copy of the optimizer, built for a variable with one row, by which it learns the slots. The rows change as
    those of a variable do by `row_updates`.

    Args:
      optimizer: a `keras.optimizers.Optimizer`. It is not changed, and later changes of it have no effect.
      dim: the length of a row.

    Raises:
      ValueError: the optimizer computes with whole variables, accumulates gradients, averages, or scales the loss.

    Attributes:
      slots: what a new row has in each slot, by the slot's name; arrays of the shape of a row, or scalars.
      learning_rate: the initial one, or None if it is a schedule or a function.
    """

    def __init__(self, optimizer: Any, dim: int) -> None:
        _check(optimizer)
        # Private: the config would serialize a schedule or function, which not all can be.
        rate = optimizer._learning_rate
        is_number = isinstance(rate, keras.Variable)
        config = {**optimizer.get_config(), "learning_rate": float(rate.numpy()) if is_number else rate}
        self._optimizer = type(optimizer).from_config(config)
        self._row = keras.Variable(np.zeros([1, dim], np.float32), name="row")
        self._optimizer.build([self._row])
        self.learning_rate: float | None = config["learning_rate"] if is_number else None
        self.slots: dict[str, np.ndarray] = {
            # Private: an optimizer's slots are lists in the order of the variables that it was built with.
            name: np.asarray(variable_of(slots[0]).numpy())[0]
            for name, slots in vars(self._optimizer).items()
            if name not in _NOT_SLOTS and isinstance(slots, list) and _is_slot(slots)
        }

    def clipped(self, gradient: Any) -> Any:
        """Clips the rows of a gradient as the optimizer's options say; on the worker, since norms are of all rows."""
        # Private: Keras clips inside of its `apply`.
        return self._optimizer._clip_gradients([gradient])[0]

    def rate_at(self, step: Any) -> Any:
        """Returns the learning rate of a schedule or function at a step, a float32 scalar."""
        rate = self._optimizer._learning_rate
        is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        return tf.cast(rate(step) if is_schedule else rate(), tf.float32)

    def update(self, rows: Rows, slots: Mapping[str, Rows], gradient: Any, step: Any, rate: Any) -> None:
        """Updates rows and their slots with their gradient.

        Args:
          rows: of the table.
          slots: those of `self.slots`, for the same rows.
          gradient: a float tensor of the shape of the rows.
          step: the number of updates before this one, an int64 scalar.
          rate: the learning rate, a float32 scalar.
        """
        view = view_for_variables(self._optimizer, [self._row], [step], rate)
        view.__dict__.update({name: [slot] for name, slot in slots.items()}, _get_variable_index=lambda _: 0)
        if isinstance(view, keras.optimizers.Nadam):
            # Private: Keras multiplies it once for all variables, before their updates.
            view.__dict__["_u_product"] = StandIn(product_of_momenta(view.beta_1, step + 1))
        if view.weight_decay is not None:
            rows.assign_sub(rows.value * view.weight_decay * rate)
        view.update_step(gradient, rows, rate)

    def __repr__(self) -> str:
        return f"<RowOptimizer {type(self._optimizer).__name__}>"


def _is_slot(slots: list[Any]) -> bool:
    return len(slots) == 1 and isinstance(slots[0], keras.Variable) and slots[0].shape[:1] == (1,)


def _check(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise ValueError(f"A table takes an optimizer for its rows alone, not a {kind}: give it one of its parts.")
    if not updates_rows(optimizer):
        raise ValueError(
            f"{kind} computes with whole variables, and a table has none. Use an elementwise optimizer of Keras, such "
            "as Adagrad or Adam, RowwiseAdagrad, or a function (rows, gradient)."
        )
    for option in ("gradient_accumulation_steps", "use_ema", "loss_scale_factor"):
        if getattr(optimizer, option):
            raise ValueError(f"The optimizer of a table cannot have {option}. Leave it out.")
