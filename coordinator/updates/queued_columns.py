"""How the gradients of one server's variables are laid out in columns when each push may be of another kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates.gradient_store import ChosenRows
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.transport.model import Model

# What a push may have for a variable.
_NONE, _DENSE, _SPARSE = range(3)
_COLUMNS_PER_VARIABLE = 3


class QueuedColumns:
    """Three columns for each variable, values, indices and kind, and one for each scalar that the optimizer needs.

    Every row has all of them, so that it tells by itself what it is: the step that applies a gradient may have been
    traced before anybody pushed one, or in another program.

    Args:
      model: the variables of all servers.
      device: the server's CPU; it may have no variable of the model.
      scalars: the dtypes of the scalars.

    Attributes:
      numbers: the positions of the server's variables in the model.
      places: of each column, its position among those of a server that has the whole model.
      width: how many columns such a server has.
    """

    def __init__(self, model: Model, device: str, scalars: Sequence[tf.DType]) -> None:
        self.numbers = model.numbers_on(device)
        self._variables = {number: model.variables[number] for number in self.numbers}
        self._column = {number: _COLUMNS_PER_VARIABLE * place for place, number in enumerate(self.numbers)}
        self._scalars = dict(enumerate(scalars, start=_COLUMNS_PER_VARIABLE * len(self.numbers)))
        of_all = _COLUMNS_PER_VARIABLE * len(model.variables)
        self.width = of_all + len(scalars)
        firsts = [_COLUMNS_PER_VARIABLE * number for number in self.numbers]
        self.places = [first + part for first in firsts for part in range(_COLUMNS_PER_VARIABLE)]
        self.places += range(of_all, self.width)

    @property
    def dtypes(self) -> list[tf.DType]:
        """Those of all columns."""
        found: list[tf.DType] = []
        for variable in self._variables.values():
            found += [variable.dtype, tf.int64, tf.int32]
        return [*found, *self._scalars.values()]

    def row(self, sent: SentGradients, scalars: Sequence[Any]) -> dict[int, Any]:
        """All columns of a gradient."""
        gradients = dict(zip(sent.numbers, sent.gradients, strict=True))
        found: dict[int, Any] = {}
        for number, column in self._column.items():
            dtype = self._variables[number].dtype
            values, indices, kind = tf.zeros([0], dtype), tf.zeros([0], tf.int64), _NONE
            gradient = gradients.get(number)
            if isinstance(gradient, tf.IndexedSlices):
                values, indices, kind = tf.cast(gradient.values, dtype), tf.cast(gradient.indices, tf.int64), _SPARSE
            elif gradient is not None:
                values, kind = tf.cast(gradient, dtype), _DENSE
            found |= {column: values, column + 1: indices, column + 2: tf.constant(kind)}
        return found | dict(zip(self._scalars, scalars, strict=True))

    def used(self, _: Mapping[int, bool]) -> list[int]:
        """The columns that rows have: all."""
        return list(range(len(self.dtypes)))

    def scalars(self, rows: ChosenRows) -> list[Any]:
        """The scalars that came with the first gradient."""
        return [tf.ensure_shape(rows.only(column, dtype), []) for column, dtype in self._scalars.items()]

    def apply(self, rows: ChosenRows, apply: Callable[[int, Any], None]) -> None:
        """Applies the first gradient.

        Args:
          rows: those of an update.
          apply: called with the position of a variable and its gradient, while graphs are built for the kinds that the
            gradient may be of; what it builds runs for those that are there.
        """
        for number, column in self._column.items():
            kinds = [lambda: False, self._branch(number, rows, apply, is_sparse=False)]
            if self._variables[number].shape.rank != 0:
                kinds.append(self._branch(number, rows, apply, is_sparse=True))
            tf.switch_case(tf.ensure_shape(rows.only(column + 2, tf.int32), []), kinds)

    def _branch(
        self, number: int, rows: ChosenRows, apply: Callable[[int, Any], None], *, is_sparse: bool
    ) -> Callable[[], bool]:
        variable, column = self._variables[number], self._column[number]

        def branch() -> bool:
            values = rows.only(column, variable.dtype)
            if is_sparse:
                values = tf.ensure_shape(values, tf.TensorShape([None]).concatenate(variable.shape[1:]))
                indices = tf.ensure_shape(rows.only(column + 1, tf.int64), [None])
                apply(number, tf.IndexedSlices(values, indices, tf.shape(variable.read_value(), tf.int64)))
            else:
                apply(number, tf.ensure_shape(values, variable.shape))
            return True

        return branch

    def __repr__(self) -> str:
        return f"<QueuedColumns of {len(self.numbers)} variables>"
