"""The layout in columns of the gradients of one server's variables.

    per variable: values | indices | kind | pulled     per optimizer: scalar | scalar ...

Usually all pushes have the same kinds of gradients: `kind` does not exist, and the indices of dense gradients are left
out. With `has_kinds`, each row has all columns and tells its kinds itself: the step that applies a gradient may have
been traced before any push, or in another program. `pulled`, the value that a dense gradient was computed on, exists
only for rules that ask for it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import without_repeats
from coordinator.updates.transport.model import Model

# The kinds of gradients of a variable in one push.
_NONE, _DENSE, _SPARSE = range(3)


@dataclasses.dataclass(frozen=True)
class ChosenRows:
    """The rows of an update.

    Attributes:
      lists: a TensorList of all rows in the store, for each column.
      places: the positions of the chosen rows, in the order of the ids; int64.
      is_chosen: by position, whether a row is chosen; bool.
    """

    lists: Sequence[Any]
    places: Any
    is_chosen: Any

    @property
    def workers(self) -> Any:
        """The workers that have pushed them, int64 [n]: the first number of the ids, which are the last list."""
        return self.stacked(len(self.lists) - 1, tf.int64, tf.TensorShape([None]))[:, 0]

    def first(self, column: int, dtype: tf.DType) -> Any:
        """Returns a column of the first row, in the shape that it was added with."""
        return item(self.lists[column], self.places[0], dtype)

    def stacked(self, column: int, dtype: tf.DType, shape: tf.TensorShape) -> Any:
        """Returns a column whose rows have the same shape, stacked along a new first dimension."""
        rows = tf.raw_ops.TensorListGather(
            input_handle=self.lists[column],
            indices=tf.cast(self.places, tf.int32),
            element_shape=tf.constant(-1),
            element_dtype=dtype,
        )
        return tf.ensure_shape(rows, tf.TensorShape([None]).concatenate(shape))

    def concatenated(self, column: int, dtype: tf.DType, shape: Sequence[int | None]) -> Any:
        """Returns a column whose rows differ in their first dimension, concatenated along it.

        Args:
          column: its number.
          dtype: its dtype.
          shape: of a row, without the first dimension.
        """
        together, lengths = tf.raw_ops.TensorListConcatV2(
            input_handle=self.lists[column],
            element_shape=tf.constant([-1, *(-1 if size is None else size for size in shape)]),
            leading_dims=tf.constant([], tf.int64),
            element_dtype=dtype,
        )
        return tf.boolean_mask(tf.ensure_shape(together, [None, *shape]), tf.repeat(self.is_chosen, lengths))


class GradientColumns:
    """The columns of one server.

    Args:
      model: the variables of all servers.
      device: the server's CPU; it may have no variable of the model.
      scalars: the dtypes of the scalars that the optimizer needs.
      is_sparse: by the positions of the variables that have gradients, whether these are `tf.IndexedSlices`; filled
        when a push is traced, and shared by all servers. None if each push may have other kinds of gradients.
      has_pulled: whether a dense gradient is stored with the value that it was computed on.

    Attributes:
      has_kinds: whether each push may have other kinds of gradients.
      dtypes: of all columns.
      places: the position of each column among those of a server that has the whole model.
      width: the number of columns of such a server.
    """

    def __init__(
        self,
        model: Model,
        device: str,
        scalars: Sequence[tf.DType],
        is_sparse: dict[int, bool] | None,
        *,
        has_pulled: bool = False,
    ) -> None:
        self.device = device
        self.has_kinds = is_sparse is None
        self.is_sparse = {} if is_sparse is None else is_sparse
        self._variables = {number: model.variables[number] for number in model.by_device.get(device, ())}
        per_variable = 2 + self.has_kinds + has_pulled
        self._pulled = per_variable - 1 if has_pulled else None
        self._column = {number: per_variable * place for place, number in enumerate(self._variables)}
        self._scalars = dict(enumerate(scalars, start=per_variable * len(self._variables)))
        self.dtypes: list[tf.DType] = []
        for variable in self._variables.values():
            kind, pulled = [tf.int32] * self.has_kinds, [variable.dtype] * has_pulled
            self.dtypes += [variable.dtype, tf.int64, *kind, *pulled]
        self.dtypes += self._scalars.values()
        of_variables = per_variable * len(model.variables)
        self.width = of_variables + len(scalars)
        self.places = [per_variable * number + part for number in self._variables for part in range(per_variable)]
        self.places += range(of_variables, self.width)

    def row(
        self, gradients: Mapping[int, Any], scalars: Sequence[Any], pulled: Mapping[int, Any] | None = None
    ) -> dict[int, Any]:
        """Returns the columns of a push, from the gradients and pulled values by the positions of their variables."""
        found: dict[int, Any] = {}
        for number, column in self._column.items():
            dtype, gradient = self._variables[number].dtype, gradients.get(number)
            if self.has_kinds:
                kind = _NONE if gradient is None else _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE
                found |= {column: tf.zeros([0], dtype), column + 1: tf.zeros([0], tf.int64)}
                found[column + 2] = tf.constant(kind)
            if isinstance(gradient, tf.IndexedSlices):
                found |= {column: tf.cast(gradient.values, dtype), column + 1: tf.cast(gradient.indices, tf.int64)}
            elif gradient is not None:
                found[column] = tf.cast(gradient, dtype)
                if self._pulled is not None and pulled is not None:
                    found[column + self._pulled] = pulled[number]
        return found | dict(zip(self._scalars, scalars, strict=True))

    def used(self) -> list[int]:
        """Returns the columns that rows have."""
        if self.has_kinds:
            return list(range(len(self.dtypes)))
        found: list[int] = []
        for number, column in self._column.items():
            if number in self.is_sparse:
                pulled = [] if self._pulled is None else [column + self._pulled]
                found += [column, column + 1] if self.is_sparse[number] else [column, *pulled]
        return [*found, *self._scalars]

    def scalars(self, rows: ChosenRows) -> list[Any]:
        """Returns the scalars of the last push among the rows."""
        return [rows.stacked(column, dtype, tf.TensorShape([]))[-1] for column, dtype in self._scalars.items()]

    def combined(self, rows: ChosenRows, combine: Callable[..., Any]) -> dict[int, Any]:
        """Returns the gradients of an update by the positions of their variables, computed in float32 if less precise.

        Args:
          rows: those of the update.
          combine: makes one of several dense gradients, see `Accumulating.combine`. Sparse ones have a mean.
        """
        return {
            number: self._mean_of_rows(number, rows) if is_sparse else self._combined_of(number, rows, combine)
            for number, is_sparse in sorted(self.is_sparse.items())
            if number in self._variables
        }

    def apply_first(self, rows: ChosenRows, apply: Callable[[int, Any], None]) -> None:
        """Applies the first gradient of rows that tell their kinds.

        Args:
          rows: those of an update.
          apply: called with a variable's position and its gradient, once for each kind while the graph is built; what
            it builds runs for the kind that the gradient has.
        """
        for number, column in self._column.items():
            kinds = [lambda: False, self._branch(number, rows, apply, is_sparse=False)]
            if self._variables[number].shape.rank != 0:
                kinds.append(self._branch(number, rows, apply, is_sparse=True))
            tf.switch_case(tf.ensure_shape(rows.first(column + 2, tf.int32), []), kinds)

    def _combined_of(self, number: int, rows: ChosenRows, combine: Callable[..., Any]) -> Any:
        variable, column = self._variables[number], self._column[number]
        dtype = _precise(variable.dtype)
        columns = [column, *([] if self._pulled is None else [column + self._pulled])]
        gradients, *pulled = (tf.cast(rows.stacked(each, variable.dtype, variable.shape), dtype) for each in columns)
        return tf.cast(combine(variable, gradients, rows.workers, *(pulled or [None])), variable.dtype)

    def _mean_of_rows(self, number: int, rows: ChosenRows) -> Any:
        variable, column = self._variables[number], self._column[number]
        dtype = _precise(variable.dtype)
        count = tf.cast(tf.size(rows.places), dtype)
        values = tf.cast(rows.concatenated(column, variable.dtype, variable.shape[1:].as_list()), dtype)
        indices = rows.concatenated(column + 1, tf.int64, [])
        shape = _shape_of(variable)
        merged = without_repeats(tf.IndexedSlices(values, indices, shape))
        return tf.IndexedSlices(tf.cast(merged.values / count, variable.dtype), merged.indices, shape)

    def _branch(
        self, number: int, rows: ChosenRows, apply: Callable[[int, Any], None], *, is_sparse: bool
    ) -> Callable[[], bool]:
        variable, column = self._variables[number], self._column[number]

        def branch() -> bool:
            values = rows.first(column, variable.dtype)
            if is_sparse:
                values = tf.ensure_shape(values, tf.TensorShape([None]).concatenate(variable.shape[1:]))
                indices = tf.ensure_shape(rows.first(column + 1, tf.int64), [None])
                apply(number, tf.IndexedSlices(values, indices, _shape_of(variable)))
            else:
                apply(number, tf.ensure_shape(values, variable.shape))
            return True

        return branch


def _precise(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _shape_of(variable: tf.Variable) -> Any:
    # Without a read, which would copy a table of which rows have been changed.
    return tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)


def item(rows: Any, place: Any, dtype: tf.DType) -> Any:
    """Returns an item of a TensorList, in the shape that it was added with."""
    return tf.raw_ops.TensorListGetItem(
        input_handle=rows, index=tf.cast(place, tf.int32), element_shape=tf.constant(-1), element_dtype=dtype
    )
