"""How the gradients of one server's variables are laid out in columns, and what their mean is."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates.gradient_store import ChosenRows
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.transport.model import Model, without_repeats


class GradientColumns:
    """Two columns for each variable, values and indices, and one for each scalar that the optimizer needs.

    Args:
      model: the variables of all servers.
      device: the server's CPU; it may have no variable of the model.
      scalars: the dtypes of the scalars.
    """

    def __init__(self, model: Model, device: str, scalars: Sequence[tf.DType]) -> None:
        self._variables = {number: model.variables[number] for number in model.numbers_on(device)}
        self._column = {number: 2 * place for place, number in enumerate(self._variables)}
        self._scalars = dict(enumerate(scalars, start=2 * len(self._variables)))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The positions of the server's variables in the model."""
        return tuple(self._variables)

    @property
    def dtypes(self) -> list[tf.DType]:
        """Those of all columns."""
        found: list[tf.DType] = []
        for variable in self._variables.values():
            found += [variable.dtype, tf.int64]
        return [*found, *self._scalars.values()]

    def row(self, sent: SentGradients, scalars: Sequence[Any]) -> dict[int, Any]:
        """The columns of a gradient; those of a dense one's indices are left out."""
        found: dict[int, Any] = {}
        for number, gradient in zip(sent.numbers, sent.gradients, strict=True):
            column, dtype = self._column[number], self._variables[number].dtype
            if isinstance(gradient, tf.IndexedSlices):
                found[column] = tf.cast(gradient.values, dtype)
                found[column + 1] = tf.cast(gradient.indices, tf.int64)
            else:
                found[column] = tf.cast(gradient, dtype)
        return found | dict(zip(self._scalars, scalars, strict=True))

    def used(self, is_sparse: Mapping[int, bool]) -> list[int]:
        """The columns that rows have.

        Args:
          is_sparse: by the positions of the variables that there are gradients of, whether they are
            `tf.IndexedSlices`.
        """
        found: list[int] = []
        for number, column in self._column.items():
            if number in is_sparse:
                found += [column, column + 1] if is_sparse[number] else [column]
        return [*found, *self._scalars]

    def mean(self, rows: ChosenRows, is_sparse: Mapping[int, bool]) -> tuple[list[int], list[Any]]:
        """The mean of some gradients, computed in float32 if they are less precise.

        Returns:
          The positions of the variables, and their gradients.
        """
        numbers = [number for number in self._variables if number in is_sparse]
        return numbers, [self._mean_of(number, rows, is_sparse[number]) for number in numbers]

    def scalars(self, rows: ChosenRows) -> list[Any]:
        """The scalars that came with the gradient that was pushed last."""
        return [rows.stacked(column, dtype, tf.TensorShape([]))[-1] for column, dtype in self._scalars.items()]

    def _mean_of(self, number: int, rows: ChosenRows, is_sparse: bool) -> Any:
        variable, column = self._variables[number], self._column[number]
        dtype = tf.float32 if variable.dtype in (tf.float16, tf.bfloat16) else variable.dtype
        count = tf.cast(rows.count, dtype)
        if not is_sparse:
            stacked = rows.stacked(column, variable.dtype, variable.shape)
            return tf.cast(tf.reduce_sum(tf.cast(stacked, dtype), 0) / count, variable.dtype)
        values = tf.cast(rows.joined(column, variable.dtype, variable.shape[1:].as_list()), dtype)
        indices = rows.joined(column + 1, tf.int64, [])
        shape = tf.shape(variable.read_value(), tf.int64)
        merged = without_repeats(tf.IndexedSlices(values, indices, shape))
        return tf.IndexedSlices(tf.cast(merged.values / count, variable.dtype), merged.indices, shape)
