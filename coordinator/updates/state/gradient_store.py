"""Pushed gradients that wait on one server until it is decided which of them make an update.

A push is a row: its columns are the gradients of single variables, and what was sent with them. Rows are stored, not
sums, so that a row of a worker that died before it had sent the rest to the other servers can be left out of the update
on all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, client_may_call
from coordinator.updates.state.gradient_columns import ChosenRows, GradientColumns, item


def new_vector_list(width: int) -> tf.Variable:
    """Creates a variable that holds an empty list of int64 vectors of this width. Called in the strategy's scope."""
    return tf.Variable(lambda: vector_list(tf.zeros([0, width], tf.int64)), dtype=tf.variant, shape=[], trainable=False)


def vector_list(vectors: Any) -> Any:
    """Converts vectors, int64 [n, width], to a TensorList."""
    return tf.raw_ops.TensorListFromTensor(tensor=vectors, element_shape=tf.constant([vectors.shape[1]]))


def vectors_of(rows: Any, width: int) -> Any:
    """Converts a TensorList to its vectors, int64 [n, width]."""
    stacked = tf.raw_ops.TensorListStack(
        input_handle=rows, element_shape=tf.constant([width]), element_dtype=tf.int64, num_elements=-1
    )
    return tf.ensure_shape(stacked, [None, width])


# The id of a push: worker, connection of that worker, microseconds on that worker's clock.
PUSH_ID_SIZE = 3
# In the id of a dropped row.
_NO_WORKER = -2


class GradientStore:
    """The rows on one server. Created in the strategy's scope. Not in checkpoints.

    Operations under the lock need no other machine; once begun they finish, even if the worker that began them dies.

    A dropped row leaves an empty place. The empty places are removed when they are at least as many as the remaining
    rows, so that the cost of dropping a row does not depend on their number; until then its tensors stay in memory.

    Args:
      lock: of that server.
      beside: a variable on that server.
      columns: the layout of the rows.
      update_size: the largest number of rows in an update.
      use: changes the server's variables by the rows of an update; called under the lock.
      may_reject: whether a push from a live worker may be rejected.

    Attributes:
      device: the server's CPU.
    """

    # The ids of the pushes are the last list. A variable of a partially known shape would be simpler, but TensorFlow's
    # workers crash on its handle.

    def __init__(
        self,
        lock: ServerMutex,
        beside: tf.Variable,
        columns: GradientColumns,
        update_size: int,
        use: Callable[[ChosenRows], None],
        *,
        may_reject: bool,
    ) -> None:
        self.device = lock.device
        self.columns = columns
        self._lock = lock
        self._may_reject = may_reject
        self._update_size = update_size
        self._use = use
        self._dtypes = (*columns.dtypes, tf.int64)
        with tf.distribute.get_strategy().extended.colocate_vars_with(beside):
            self.lists = tf.Variable(self._empty, dtype=tf.variant, shape=[len(self._dtypes)], trainable=False)

    def add(self, push: Any, row: Mapping[int, Any]) -> Any:
        """Adds a row.

        Args:
          push: its id, int64 [3]; on the server, like all arguments.
          row: tensors, by column; columns that are left out have to be left out of all rows.

        Returns:
          The operation that adds it.
        """
        with self._lock.hold([push, *row.values()]):
            lists = self._with_row(self.lists.read_value(), {**row, len(self._dtypes) - 1: push})
            return self.lists.assign(lists, read_value=False)

    @client_may_call(tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64))
    def use_once(self, ids: Any) -> Any:
        """Uses the rows of an update and drops them, unless that was done already.

        Args:
          ids: of the pushes in this update and the next ones, in their order; int64 [n, 3], n > 0.

        Returns:
          A tensor that is available afterwards.
        """
        with tf.device(self.device):
            ids = tf.identity(ids)
        with self._lock.hold([ids]):
            # Used rows are dropped. A late caller, perhaps by some updates, does not find the first one.
            pushes = vectors_of(tf.unstack(self.lists.read_value(), num=len(self._dtypes))[-1], PUSH_ID_SIZE)
            is_stored = tf.reduce_any(tf.reduce_all(pushes == ids[0], 1))
            return tf.cond(is_stored, lambda: self._use_and_drop(ids), lambda: tf.constant(False))

    def drop(self, push: Any) -> Any:
        """Drops the row of a push that is in no update.

        Args:
          push: its id, int64 [3].

        Returns:
          The operation that drops it.
        """
        with tf.device(self.device):
            push = tf.identity(push)
        with self._lock.hold([push]):
            lists = tf.unstack(self.lists.read_value(), num=len(self._dtypes))
            is_other = tf.reduce_any(vectors_of(lists[-1], PUSH_ID_SIZE) != push, 1)
            return self.lists.assign(self._only(lists, tf.cast(tf.where(is_other)[:, 0], tf.int32)), read_value=False)

    @client_may_call()
    def clear(self) -> None:
        """Drops all rows."""
        with self._lock.hold():
            self.lists.assign(self._empty(), read_value=False)

    @client_may_call(tf.TensorSpec([PUSH_ID_SIZE], tf.int64))
    def serialized(self, push: Any) -> Any:
        """Serializes a row that has all columns.

        Args:
          push: its id, int64 [3].

        Returns:
          The columns for `tf.io.parse_tensor`, string [columns]; string [0] if there is no such row.
        """
        with tf.device(self.device):
            push = tf.identity(push)
        with self._lock.hold([push]):
            lists = tf.unstack(self.lists.read_value(), num=len(self._dtypes))
            is_match = tf.reduce_all(vectors_of(lists[-1], PUSH_ID_SIZE) == push, 1)

            def columns() -> Any:
                place = tf.argmax(tf.cast(is_match, tf.int32))
                columns = zip(lists[:-1], self._dtypes[:-1], strict=True)
                return tf.stack([tf.io.serialize_tensor(item(rows, place, dtype)) for rows, dtype in columns])

            return tf.cond(tf.reduce_any(is_match), columns, lambda: tf.zeros([0], tf.string))

    @client_may_call(tf.TensorSpec([PUSH_ID_SIZE], tf.int64), tf.TensorSpec([None], tf.string))
    def add_serialized(self, push: Any, strings: Any) -> None:
        """Adds a row as `serialized` returns it."""
        with tf.device(self.device):
            push, strings = tf.identity(push), tf.identity(strings)
            dtypes = enumerate(self.columns.dtypes)
            self.add(push, {column: tf.io.parse_tensor(strings[column], dtype) for column, dtype in dtypes})

    def _use_and_drop(self, ids: Any) -> Any:
        lists = tf.unstack(self.lists.read_value(), num=len(self._dtypes))
        pushes = vectors_of(lists[-1], PUSH_ID_SIZE)
        is_same = tf.reduce_all(ids[:, None] == pushes, -1)
        chosen = is_same[: self._update_size]
        is_chosen = tf.reduce_any(chosen, 0)
        is_kept = tf.reduce_any(is_same, 0) | ~_is_obsolete(pushes, may_reject=self._may_reject)
        is_kept &= ~is_chosen & (pushes[:, 0] != _NO_WORKER)
        kept = tf.cast(tf.where(is_kept)[:, 0], tf.int32)
        left = tf.cond(
            2 * tf.size(kept) > tf.size(is_kept),
            lambda: tf.stack([*lists[:-1], vector_list(tf.where(is_kept[:, None], pushes, _NO_WORKER))]),
            lambda: self._only(lists, kept),
        )
        dropped = self.lists.assign(left, read_value=False)
        # Dropped first, so that rows whose use fails are not used again: it may have changed some of the variables.
        with tf.control_dependencies([dropped]):
            self._use(ChosenRows(lists, tf.argmax(tf.cast(chosen, tf.int32), 1), is_chosen))
        return tf.constant(True)

    def _only(self, lists: Sequence[Any], kept: Any) -> Any:
        """Returns the lists with these rows only."""
        columns = [*self.columns.used(), len(lists) - 1]

        def with_next(number: Any, found: Any) -> tuple[Any, Any]:
            row = {column: item(lists[column], kept[number], self._dtypes[column]) for column in columns}
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


def _is_obsolete(pushes: Any, *, may_reject: bool) -> Any:
    """Returns by row whether the push will never be part of an update, unless it is accepted already.

    A push of an older connection is rejected once its worker has pushed on a newer one. If pushes may be rejected, one
    that is not accepted when its worker pushes again never will be; if not, it may have been accepted since the caller
    got the accepted ids.
    """
    worker, connection, _ = tf.unstack(pushes, axis=1)
    is_older = connection > connection[:, None]
    if may_reject:
        place = tf.range(tf.size(worker))
        is_older |= (connection == connection[:, None]) & (place > place[:, None])
    return tf.reduce_any((worker == worker[:, None]) & is_older, 1)
