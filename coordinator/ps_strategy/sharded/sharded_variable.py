"""A `tf.Variable` whose rows are on several parameter servers.

  ShardedVariable [10, 4]        has a handle of the whole shape, without a value, that identifies it to gradient tapes
    parts[0] [3, 4]  part_0      a variable on ps 0
    parts[1] [3, 4]  part_1                on ps 1
    parts[2] [2, 4]  part_2                on ps 0
    parts[3] [2, 4]  part_3                on ps 1

Each part has consecutive rows, as in TensorFlow's "div" layout: if the rows cannot be divided evenly, the first parts
have one row more.

A look-up or update of rows exchanges with each server only the rows of that server. A look-up returns rows in the order
of the request. Its gradient is for the whole variable: `tf.IndexedSlices` with row numbers of the whole variable.
Operations on the whole value, such as `numpy()` or an operator, read all parts. An update of one row is atomic, as in
any other variable; an update of several parts is not.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import SavedInSlices
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import (
    UnstoredVariable,
    is_being_exported,
    not_recorded,
)


@dataclasses.dataclass(frozen=True)
class Routed:
    """The `part` of each of n rows, int32 [n], and for each of `count` parts the `local` indices of its rows."""

    part: Any
    local: Sequence[Any]
    count: int

    def split(self, values: Any) -> list[Any]:
        """Divides the values of all rows, [n, ...], among the parts."""
        return tf.dynamic_partition(values, self.part, self.count)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A division of `rows` rows into `parts` parts, of at least one row each."""

    rows: int
    parts: int

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        base, extra = divmod(self.rows, self.parts)
        return (base + 1,) * extra + (base,) * (self.parts - extra)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))[:-1]

    def route(self, indices: Any) -> Routed:
        """Finds the part of each row. `indices` are int32 or int64 [n].

        An index out of range goes to the first or last part, where it is out of range too: the server refuses it.
        """
        base, extra = divmod(self.rows, self.parts)
        part = (indices - extra) // base
        if extra:
            part = tf.maximum(part, indices // (base + 1))
        part = tf.clip_by_value(part, 0, self.parts - 1)
        local = indices - part * base - (tf.minimum(part, extra) if extra else 0)
        part = tf.cast(part, tf.int32)
        return Routed(part, tf.dynamic_partition(local, part, self.parts), self.parts)


def _scatter_method(method: str) -> Any:

    def scatter(self: Any, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        if is_being_exported():
            return getattr(super(ShardedVariable, self), method)(sparse_delta, use_locking, name)
        for part, slices in zip(self.parts, self.split_rows(sparse_delta), strict=True):
            getattr(part, method)(slices, name=name)
        return self

    return scatter


def _scatter_nd_method(method: str) -> Any:

    def scatter_nd(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        if is_being_exported():
            return getattr(super(ShardedVariable, self), method)(indices, updates, name)
        indices = tf.convert_to_tensor(indices)
        depth = indices.shape[-1]
        flat = tf.reshape(indices, [-1, depth])
        values = tf.reshape(tf.convert_to_tensor(updates, self.dtype), [-1, *self.shape[depth:]])
        routed = self.partition.route(flat[:, 0])
        rest, updates = routed.split(flat[:, 1:]), routed.split(values)
        for part, local, inner, value in zip(self.parts, routed.local, rest, updates, strict=True):
            getattr(part, method)(tf.concat([local[:, tf.newaxis], inner], 1), value, name)
        return self

    return scatter_nd


def _assign_method(method: str) -> Any:

    def assign(self: Any, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        if is_being_exported():
            return getattr(super(ShardedVariable, self), method)(value, use_locking, name, read_value)
        for part, rows in zip(self.parts, self._split_value(value), strict=True):
            getattr(part, method)(rows, name=name, read_value=False)
        return self if read_value else None

    return assign


class ShardedVariable(SavedInSlices, UnstoredVariable):
    """A variable that concatenates other variables along the first axis.

    Args:
      parts: `tf.Variable`s with the rows of each part, as `Partition` divides them.
      name: without `:0`, name scopes included.
      options: see `UnstoredVariable`.

    Attributes:
      parts: the variables that have the rows.
      partition: which rows are in which part.
    """

    def __init__(self, parts: Sequence[tf.Variable], name: str, **options: Any) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        self.partition = Partition(sum(part.shape[0] for part in self.parts), len(self.parts))
        shape = [self.partition.rows, *first.shape[1:]]
        super().__init__(name, shape, first.dtype, first.device, **options)

    @property
    def variables(self) -> list[tf.Variable]:
        """The parts; during the export of a SavedModel only this variable, because the SavedModel saves it whole."""
        return [self] if is_being_exported() else list(self.parts)

    def __iter__(self) -> Iterator[tf.Variable]:
        return iter(self.variables)

    def __len__(self) -> int:
        return self.partition.rows

    def __getitem__(self, index: Any) -> Any:
        """Indexes like `tf.Variable`; an int or a slice along the first axis reads only the indexed rows."""
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        rows = self._rows_at(first)
        if rows is None or is_being_exported():
            return tf.convert_to_tensor(self)[index]
        values = self.sparse_read(rows)
        if not rest:
            return values
        others = rest if isinstance(rows, int) or rows.shape.rank == 0 else [slice(None), *rest]
        return values[tuple(others)]

    def _rows_at(self, index: Any) -> Any:
        """Returns the row numbers of an index along the first axis; None for other kinds of indices."""
        count = self.partition.rows
        if isinstance(index, slice):
            bounds = (index.start, index.stop, index.step)
            if all(bound is None or isinstance(bound, int | np.integer) for bound in bounds):
                rows = range(count)[index]
                # TensorFlow refuses some bounds of an empty range.
                bounds = (rows.start, rows.stop, rows.step) if rows else (0, 0, 1)
                return None if rows == range(count) else tf.range(*bounds, dtype=tf.int64)
        elif isinstance(index, int | np.integer) and not isinstance(index, bool):
            if not -count <= index < count:
                raise IndexError(f"Index {index} is out of bounds for {self.name!r}, which has {count} rows.")
            return int(index) % count
        elif tf.is_tensor(index) and index.dtype.is_integer and index.shape.rank == 0:
            index = tf.cast(index, tf.int64)
            return tf.where(index < 0, index + count, index)
        return None

    def split_rows(self, slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        """Returns for each part its rows of `slices`, with indices in the part; TypeError for other arguments."""
        if not isinstance(slices, tf.IndexedSlices):
            raise TypeError(f"Argument `sparse_delta` must be a `tf.IndexedSlices`. Received arg: {slices}")
        indices = tf.reshape(tf.convert_to_tensor(slices.indices), [-1])
        values = tf.convert_to_tensor(slices.values, self.dtype)
        routed = self.partition.route(indices)
        if values.shape.rank == 0:
            return [tf.IndexedSlices(values, local) for local in routed.local]
        split = routed.split(tf.reshape(values, [-1, *self.shape[1:]]))
        return [tf.IndexedSlices(rows, local) for rows, local in zip(split, routed.local, strict=True)]

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Returns rows, [*indices.shape, *row], in the order of the indices."""
        if is_being_exported():
            return super().sparse_read(indices, name)
        with tf.name_scope(name or "ShardedGather"):
            with not_recorded():
                indices = tf.convert_to_tensor(indices)
                routed = self.partition.route(tf.reshape(indices, [-1]))
                read = [part.sparse_read(local) for part, local in zip(self.parts, routed.local, strict=True)]
                positions = routed.split(tf.range(tf.size(routed.part)))
                shape = tf.concat([tf.shape(indices), self.shape[1:]], 0)
                rows = tf.reshape(tf.dynamic_stitch(positions, read), shape)
                rows.set_shape(indices.shape.concatenate(self.shape[1:]))
            return self._rows_read(rows, indices)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        if is_being_exported():
            return super().gather_nd(indices, name)
        with tf.name_scope(name or "ShardedGatherNd"):
            indices = tf.convert_to_tensor(indices)
            rows = self.sparse_read(indices[..., 0])
            batch_dims = indices.shape.rank - 1
            return rows if indices.shape[-1] == 1 else tf.gather_nd(rows, indices[..., 1:], batch_dims)

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        # Private: all reads of the whole value go through this method.
        if is_being_exported():
            return super()._read_variable_op(no_copy)
        with not_recorded():
            values = [part.read_value_no_copy() if no_copy else part.value() for part in self.parts]
            value = tf.concat(values, 0)
        return self._value_read(value)

    def is_initialized(self, name: str | None = None) -> Any:
        return tf.reduce_all([part.is_initialized() for part in self.parts], name=name)

    assign = _assign_method("assign")
    assign_add = _assign_method("assign_add")
    assign_sub = _assign_method("assign_sub")

    scatter_add = _scatter_method("scatter_add")
    scatter_sub = _scatter_method("scatter_sub")
    scatter_max = _scatter_method("scatter_max")
    scatter_min = _scatter_method("scatter_min")
    scatter_mul = _scatter_method("scatter_mul")
    scatter_div = _scatter_method("scatter_div")
    scatter_update = _scatter_method("scatter_update")

    def batch_scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Assigns to elements of each row, as `tf.Variable.batch_scatter_update`; to whole rows if indices are [n]."""
        indices = tf.convert_to_tensor(sparse_delta.indices)
        if indices.shape.rank == 1:
            return self.scatter_update(sparse_delta)
        values = tf.split(tf.convert_to_tensor(sparse_delta.values, self.dtype), self.partition.sizes)
        for part, own, rows in zip(self.parts, tf.split(indices, self.partition.sizes), values, strict=True):
            part.batch_scatter_update(tf.IndexedSlices(rows, own), name=name)
        return self

    scatter_nd_add = _scatter_nd_method("scatter_nd_add")
    scatter_nd_sub = _scatter_nd_method("scatter_nd_sub")
    scatter_nd_max = _scatter_nd_method("scatter_nd_max")
    scatter_nd_min = _scatter_nd_method("scatter_nd_min")
    scatter_nd_update = _scatter_nd_method("scatter_nd_update")

    def _split_value(self, value: Any) -> list[Any]:
        """Returns the rows of each part of a value; raises ValueError for a value of another shape."""
        value = tf.convert_to_tensor(value, self.dtype)
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Cannot assign a value of shape {value.shape} to the variable {self.name!r} of shape {self.shape}."
            )
        return tf.split(tf.ensure_shape(value, self.shape), self.partition.sizes)
