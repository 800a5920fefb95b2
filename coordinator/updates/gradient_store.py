"""Pushed gradients that wait on one server until it is decided which of them make an update.

A gradient is a row: its columns are the gradients of single variables, and what else was sent with them. Rows are kept,
not sums, so that a row of a worker that died before it had sent the rest to the other servers can be left out of the
update on all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates.state.server_mutex import Exclusive
from coordinator.updates.vector_list import vector_list, vectors_of

# What a push is known by, everywhere: worker, connection of that worker, microseconds on that worker's clock.
PUSH_ID_SIZE = 3
# In the place of the id of a row that is no more: no worker has this index.
_NO_WORKER = -2


@dataclasses.dataclass(frozen=True)
class ChosenRows:
    """The rows of an update.

    Attributes:
      lists: a TensorList of all rows, for each column.
      places: which of all rows they are, in the order of their pushes' ids; int64.
      is_chosen: the same for each of all rows; bool.
    """

    lists: Sequence[Any]
    places: Any
    is_chosen: Any

    @property
    def count(self) -> Any:
        """How many they are, an int64 scalar."""
        return tf.size(self.places, tf.int64)

    def only(self, column: int, dtype: tf.DType) -> Any:
        """A column of the first row, of whatever shape it was added with."""
        return _item(self.lists[column], self.places[0], dtype)

    def stacked(self, column: int, dtype: tf.DType, shape: tf.TensorShape) -> Any:
        """A column of which all rows have the same shape, as one tensor with one more dimension in front."""
        rows = tf.raw_ops.TensorListGather(
            input_handle=self.lists[column],
            indices=tf.cast(self.places, tf.int32),
            element_shape=tf.constant(-1),
            element_dtype=dtype,
        )
        return tf.ensure_shape(rows, tf.TensorShape([None]).concatenate(shape))

    def joined(self, column: int, dtype: tf.DType, shape: Sequence[int | None]) -> Any:
        """A column whose rows differ in their first dimension, one after another.

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


class GradientStore:
    """The rows on one server. To be made in the strategy's scope. Nothing of it is in checkpoints.

    What is done under the lock needs nothing from another machine, and once begun it is finished, also if the worker
    that began it dies.

    A row that was dropped leaves its place empty. The places are given up when they are at least as many as the rows
    that are left, so that dropping one costs the same however many there are; until then its tensors are held.

    Args:
      lock: of that server.
      beside: a variable on that server.
      dtypes: of the columns.
      most: how many rows are in an update at most.
      may_reject: whether a push that came from a worker that is well may never be part of an update.
    """

    # The ids of the pushes are a list as well, the last one. A variable whose shape is known in part only would do for
    # them, if TensorFlow's workers did not die of its handle.

    def __init__(
        self, lock: Exclusive, beside: tf.Variable, dtypes: Sequence[tf.DType], most: int, *, may_reject: bool
    ) -> None:
        self._lock = lock
        self._may_reject = may_reject
        self._most = most
        self._dtypes = (*dtypes, tf.int64)
        with tf.distribute.get_strategy().extended.colocate_vars_with(beside):
            self._lists = tf.Variable(self._empty, dtype=tf.variant, shape=[len(self._dtypes)], trainable=False)

    @property
    def device(self) -> str:
        """The server's CPU."""
        return self._lock.device

    def add(self, push: Any, row: Mapping[int, Any]) -> Any:
        """Adds a row.

        Args:
          push: its id, int64 [3]; on the server, as all else.
          row: tensors, by column; columns that are left out have to be left out of all rows.

        Returns:
          An operation after which it is there.
        """
        with self._lock.hold([push, *row.values()]):
            lists = self._with_row(self._lists.read_value(), {**row, len(self._dtypes) - 1: push})
            return self._lists.assign(lists, read_value=False)

    def use_once(self, committed: Any, columns: Sequence[int], use: Callable[[ChosenRows], None]) -> Any:
        """Uses the rows of an update and drops them, unless that was done already.

        Args:
          committed: the ids of the pushes in this update and the next ones, in their order; int64 [n, 3], n > 0.
          columns: those that rows have.
          use: called under the lock with the rows.

        Returns:
          A tensor that is there afterwards.
        """
        with tf.device(self.device):
            committed = tf.identity(committed)
        with self._lock.hold([committed]):
            # Rows go when they are used. Whoever comes late, perhaps some updates later, finds the first one gone.
            pushes = push_ids(tf.unstack(self._lists.read_value(), num=len(self._dtypes))[-1])
            is_there = tf.reduce_any(tf.reduce_all(pushes == committed[0], 1))
            return tf.cond(is_there, lambda: self._use(committed, columns, use), lambda: tf.constant(False))

    def clear(self) -> Any:
        """Drops all rows; returns an operation after which they are gone."""
        with self._lock.hold():
            return self._lists.assign(self._empty(), read_value=False)

    def serialized(self, push: Any) -> Any:
        """The columns of a row, all of which it must have, as `tf.io.parse_tensor` reads them: string [columns].

        Args:
          push: its id, int64 [3]; on the server.

        Returns:
          That, or string [0] if there is no such row.
        """
        with self._lock.hold([push]):
            lists = tf.unstack(self._lists.read_value(), num=len(self._dtypes))
            is_it = tf.reduce_all(push_ids(lists[-1]) == push, 1)

            def columns() -> Any:
                place = tf.argmax(tf.cast(is_it, tf.int32))
                columns = zip(lists[:-1], self._dtypes[:-1], strict=True)
                return tf.stack([tf.io.serialize_tensor(_item(rows, place, dtype)) for rows, dtype in columns])

            return tf.cond(tf.reduce_any(is_it), columns, lambda: tf.zeros([0], tf.string))

    def _use(self, committed: Any, columns: Sequence[int], use: Callable[[ChosenRows], None]) -> Any:
        lists = tf.unstack(self._lists.read_value(), num=len(self._dtypes))
        pushes = push_ids(lists[-1])
        is_same = tf.reduce_all(committed[:, None] == pushes, -1)
        chosen = is_same[: self._most]
        is_chosen = tf.reduce_any(chosen, 0)
        is_kept = tf.reduce_any(is_same, 0) | ~_outlived(pushes, may_reject=self._may_reject)
        is_kept &= ~is_chosen & (pushes[:, 0] != _NO_WORKER)
        kept = tf.cast(tf.where(is_kept)[:, 0], tf.int32)
        left = tf.cond(
            2 * tf.size(kept) > tf.size(is_kept),
            lambda: tf.stack([*lists[:-1], vector_list(tf.where(is_kept[:, None], pushes, _NO_WORKER))]),
            lambda: self._only(lists, kept, [*columns, len(lists) - 1]),
        )
        dropped = self._lists.assign(left, read_value=False)
        # In this order, so that rows whose use fails are not used again: of what it changes, it has changed a part.
        with tf.control_dependencies([dropped]):
            use(ChosenRows(lists, tf.argmax(tf.cast(chosen, tf.int32), 1), is_chosen))
        return tf.constant(True)

    def _only(self, lists: Sequence[Any], kept: Any, columns: Sequence[int]) -> Any:
        """The lists with some of their rows only."""

        def with_next(number: Any, found: Any) -> tuple[Any, Any]:
            row = {column: _item(lists[column], kept[number], self._dtypes[column]) for column in columns}
            return number + 1, self._with_row(found, row)

        return tf.while_loop(lambda number, _: number < tf.size(kept), with_next, (0, self._empty()))[1]

    def _with_row(self, lists: Any, row: Mapping[int, Any]) -> Any:
        return tf.stack(
            [
                tf.raw_ops.TensorListPushBack(input_handle=rows, tensor=row[column]) if column in row else rows
                for column, rows in enumerate(tf.unstack(lists, num=len(self._dtypes)))
            ]
        )

    def _empty(self) -> Any:
        return tf.stack(
            [
                tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
                for dtype in self._dtypes
            ]
        )

    def __repr__(self) -> str:
        return f"<GradientStore: {len(self._dtypes)} columns on {self.device}>"


def _item(rows: Any, place: Any, dtype: tf.DType) -> Any:
    """One of the tensors of a TensorList."""
    return tf.raw_ops.TensorListGetItem(
        input_handle=rows, index=tf.cast(place, tf.int32), element_shape=tf.constant(-1), element_dtype=dtype
    )


def push_ids(rows: Any) -> Any:
    """A TensorList of push ids as a tensor, int64 [n, 3]."""
    return vectors_of(rows, PUSH_ID_SIZE)


def _outlived(pushes: Any, *, may_reject: bool) -> Any:
    """Which pushes will never be part of an update, unless they are accepted already.

    A call of a former connection is not accepted any more once its worker has pushed on a newer one. Where pushes may
    be rejected, one that is still not accepted when its worker pushes again never will be. Where not, it may have been
    accepted since the caller learnt which ones were.
    """
    worker, connection, _ = tf.unstack(pushes, axis=1)
    is_outlived = connection > connection[:, None]
    if may_reject:
        place = tf.range(tf.size(worker))
        is_outlived |= (connection == connection[:, None]) & (place > place[:, None])
    return tf.reduce_any((worker == worker[:, None]) & is_outlived, 1)
