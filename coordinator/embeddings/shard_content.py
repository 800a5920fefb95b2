"""Reads and writes of what a parameter server holds of a table, in slices: for checkpoints and deltas.

A slice is read or written under the mutex of the storage, so that each key, row, slot and stamp in it is of one moment;
slices are of different moments, unless nothing runs meanwhile. Nothing is sent to the client but what it reads.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.embeddings.shard_storage import (
    ADMITTED,
    EVICTED,
    FREE,
    FREE_STAMP,
    NEXT_WAITING,
    UNKNOWN,
    USED,
    WAITING,
    ShardStorage,
    write,
)
from coordinator.ps_strategy.tensorflow_internals.server_mutex import client_may_call, operations_added

# Of how many rows the oldest are looked for at a time: their stamps and numbers take 16 bytes each.
_SEARCHED_AT_ONCE = 2**20

_KEYS = tf.TensorSpec([None], tf.int64)
_NUMBER = tf.TensorSpec([], tf.int64)


class ShardContent:
    """The content of one shard. The client may call the methods, and functions may.

    To replace the content, call `storage.reserve()`, then write all slices.

    Args:
      storage: of the shard.
      may_leave_out: whether rows that are written without room for all take the place of older ones.
    """

    def __init__(self, storage: ShardStorage, *, may_leave_out: bool) -> None:
        self._storage = storage
        self._may_leave_out = may_leave_out

    def used(self) -> int:
        """Returns below which number the rows in use are; called on the client."""
        return int(self._storage.read_counts()[USED])

    @client_may_call(_NUMBER, _NUMBER, _NUMBER)
    def read_rows(self, first: Any, count: Any, since: Any = 0) -> tuple[Any, Any, list[Any], Any]:
        """Reads a slice of the rows that are in use, as they are at one moment.

        Slices begin below `used()`. While training goes on, a key may be evicted and get a row in another slice.

        Args:
          first: the number of a row, an int64 scalar.
          count: how many rows the slice has, free ones included; about 65,536, as updates wait meanwhile.
          since: only rows with this stamp or a later one.

        Returns:
          The keys, int64 [n]; their rows, float32 [n, dim]; their slots, in the order of `slots`; their stamps,
          int64 [n]. On the server.
        """
        storage = self._storage
        with storage.mutex.hold([first, count]):
            numbers = _slice(first, count, storage.counts.sparse_read(USED))
            stamps = storage.stamp.sparse_read(numbers)
            numbers = tf.boolean_mask(numbers, tf.logical_and(stamps > FREE_STAMP, stamps >= since))
            slots = [slot.sparse_read(numbers) for slot in storage.slots.values()]
            return (
                storage.key_of.sparse_read(numbers),
                storage.rows.sparse_read(numbers),
                slots,
                storage.stamp.sparse_read(numbers),
            )

    def write_rows(self, keys: Any, rows: Any, slots: Sequence[Any], stamps: Any) -> None:
        """Writes rows, whether their keys have rows already or not; arguments are as `read_rows` returns them.

        If there is no room for all, the oldest of these and those that are there are left out, and count as evicted.

        Raises:
          tf.errors.InvalidArgumentError: there is no room for all, and none may be left out.
        """
        storage = self._storage
        with storage.mutex.hold([keys, rows, *slots, stamps]):
            with operations_added() as made:
                is_kept = self._make_room(keys, stamps)
            with tf.control_dependencies(made):
                keys, rows, stamps, *slots = (tf.boolean_mask(each, is_kept) for each in (keys, rows, stamps, *slots))
                found = storage.find(keys)
            new_at = tf.where(found < 0)[:, 0]
            new = tf.gather(keys, new_at)
            waited = tf.math.count_nonzero(tf.gather(found, new_at) < UNKNOWN)
            storage.add_counts({WAITING: -waited})
            numbers = tf.tensor_scatter_nd_update(found, new_at[:, tf.newaxis], storage.allocate(new, 0))
            with operations_added() as writes:
                write(storage.rows, numbers, rows)
                write(storage.stamp, numbers, stamps)
                for slot, values in zip(storage.slots.values(), slots, strict=True):
                    write(slot, numbers, values)
            with tf.control_dependencies(writes):
                storage.index.insert(keys, numbers)

    def _make_room(self, keys: Any, stamps: Any) -> Any:
        """Makes room for rows that are to be written; returns which of them are, bool [n]."""
        storage = self._storage
        found, counts = storage.find(keys), storage.counts.read_value()
        missing = tf.math.count_nonzero(found < 0) - (storage.capacity - counts[USED] + counts[FREE])
        every = tf.ones(tf.shape(keys), tf.bool)
        if self._may_leave_out:
            return tf.cond(missing > 0, lambda: self._leave_out_oldest(keys, stamps, missing), lambda: every)
        text = (
            f"The table {storage.name} has no room for the rows of a checkpoint: {storage.device} has room for "
            f"{storage.capacity} rows. Create it with a larger capacity, or with when_full='evict_oldest', by which "
            "rows without a gradient for longest are left out."
        )
        tf.debugging.Assert(missing <= 0, [text])
        return every

    def _leave_out_oldest(self, keys: Any, stamps: Any, missing: Any) -> Any:
        """Evicts the oldest rows, of those that are there and those that are to be written; see `_make_room`.

        Args:
          keys: of the latter, int64 [n].
          stamps: of these, int64 [n].
          missing: how many have no room, at least 1.
        """
        storage = self._storage
        found = storage.find(keys)
        is_new = found < 0
        is_there = tf.logical_not(is_new)
        # Rows that are there get their new stamps now, so that they are not taken for older than they will be.
        with operations_added() as stamped:
            write(storage.stamp, tf.boolean_mask(found, is_there), tf.boolean_mask(stamps, is_there))
        # New rows have negative numbers here.
        places = -1 - tf.range(tf.size(keys, tf.int64))
        new = tf.boolean_mask(stamps, is_new), tf.boolean_mask(places, is_new)
        with tf.control_dependencies(stamped):
            used = storage.counts.sparse_read(USED)

            def search(first: Any, stamps: Any, numbers: Any) -> Any:
                more = _slice(first, _SEARCHED_AT_ONCE, used)
                more_stamps = storage.stamp.sparse_read(more)
                is_used = more_stamps > FREE_STAMP
                stamps = tf.concat([stamps, tf.boolean_mask(more_stamps, is_used)], 0)
                numbers = tf.concat([numbers, tf.boolean_mask(more, is_used)], 0)
                return first + _SEARCHED_AT_ONCE, *_oldest(stamps, numbers, missing)

            *_, oldest = tf.while_loop(
                lambda first, *_: first < used,
                search,
                (tf.constant(0, tf.int64), *_oldest(*new, missing)),
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape([None])),
                parallel_iterations=1,
            )
        left_out = -1 - tf.boolean_mask(oldest, oldest < 0)
        number = tf.size(left_out, tf.int64)
        with operations_added() as released:
            storage.release(tf.boolean_mask(oldest, oldest >= 0))
        with tf.control_dependencies(released):
            storage.add_counts({ADMITTED: number, EVICTED: number})
            is_there = storage.find(keys) >= 0
        is_kept = tf.tensor_scatter_nd_update(is_new, left_out[:, tf.newaxis], tf.fill([number], False))
        return tf.logical_or(is_kept, is_there)

    def read_evicted(self, first: Any, count: Any) -> Any:
        """Reads keys that were evicted, in their order.

        Args:
          first: how many were evicted before; at most `capacity` are known.
          count: how many.

        Returns:
          The keys, int64 [n]. On the server.
        """
        storage = self._storage
        with storage.mutex.hold([first, count]):
            last = tf.minimum(first + count, storage.counts.sparse_read(EVICTED))
            return storage.evicted.sparse_read(tf.range(first, last) % storage.capacity)

    def remove(self, keys: Any) -> None:
        """Evicts the keys that have rows; each may occur several times."""
        storage = self._storage
        with storage.mutex.hold([keys]):
            found = tf.unique(storage.find(keys))[0]
            storage.release(tf.boolean_mask(found, found >= 0))

    @client_may_call(_NUMBER, _NUMBER)
    def read_waiting(self, first: Any, count: Any) -> tuple[Any, Any]:
        """Reads a slice of the keys that wait, of at most `capacity`.

        Args:
          first: a number from 0 on, an int64 scalar.
          count: how many the slice has; fewer are returned, as some have been admitted.

        Returns:
          The keys, and how often each was seen, both int64 [n]. On the server.
        """
        storage = self._storage
        if storage.waiting is None:
            return tf.zeros([0], tf.int64), tf.zeros([0], tf.int64)
        with storage.mutex.hold([first, count]):
            last = tf.minimum(storage.counts.sparse_read(NEXT_WAITING), storage.capacity)
            keys = storage.waiting.sparse_read(_slice(first, count, last))
            keys = tf.unique(keys)[0]
            found = storage.find(keys)
            is_waiting = found < UNKNOWN
            return tf.boolean_mask(keys, is_waiting), -1 - tf.boolean_mask(found, is_waiting)

    @client_may_call(_KEYS, _KEYS)
    def write_waiting(self, keys: Any, times: Any) -> None:
        """Sets how often keys that have no row were seen; arguments are as `read_waiting` returns them."""
        storage = self._storage
        if storage.waiting is None:
            return
        with storage.mutex.hold([keys, times]):
            found = storage.find(keys)
            at = tf.where(found < 0)[:, 0]
            storage.wait(tf.gather(keys, at), tf.gather(times, at), tf.gather(found, at) == UNKNOWN)


def _slice(first: Any, count: Any, end: Any) -> Any:
    return tf.range(first, tf.maximum(first, tf.minimum(first + count, end)))


def _oldest(stamps: Any, numbers: Any, count: Any) -> tuple[Any, Any]:
    """Returns the least `count` stamps, or all, and their numbers."""
    negative, at = tf.math.top_k(-stamps, tf.minimum(tf.cast(count, tf.int32), tf.size(stamps)), sorted=False)
    return -negative, tf.gather(numbers, at)
