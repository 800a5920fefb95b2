"""One parameter server's part of a table: look-ups, gradients and eviction, by key, where the rows are.

    look-up     find all keys in the index, gather their rows                       no mutex
                  if some are new, or rows were changed meanwhile: again            under the mutex
                  count those that wait, give rows to those that are admitted
    gradients   find, read and compute, write these rows and slots, stamp them      under the mutex
    eviction    look for rows in a slice                                            no mutex
                  look again at some of them, remove them from the index, free them under the mutex

No number of a row leaves the server. So whatever was evicted, or given to another key, since a worker looked a key up:
its gradient finds the key's present row, or none, and is dropped then.

A row that is looked up without the mutex is whole, and of its key: rows are written, or freed, so that they can be
given to another key, only while `CHANGES` is odd, and each time it grows. A look-up for which it is odd or has grown is
done again, under the mutex. It is odd for the writing alone, which takes a small part of the time of an update.

Reads and writes of what a parameter server holds of a table, in slices: for checkpoints and deltas.

A slice is read or written under the mutex of the storage, so that each key, row, slot and stamp in it is of one moment;
slices are of different moments, unless nothing runs meanwhile. Nothing is sent to the client but what it reads.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.embeddings.shard_storage import (
    ADMITTED,
    CHANGES,
    CLOCK,
    DROPPED,
    EVICTED,
    FREE,
    FREE_STAMP,
    HAND,
    NEXT_WAITING,
    REFUSED,
    UNKNOWN,
    USED,
    WAITING,
    ShardStorage,
    in_order,
    write,
)
from coordinator.embeddings.table_settings import TableSettings, evicted
from coordinator.ps_strategy.keras.internals.optimizers import UnsharedRows
from coordinator.ps_strategy.tensorflow_internals.shared_variable import client_may_call, operations_added

# Of how many rows the oldest are looked for at a time: their stamps and numbers take 16 bytes each.
_STAMPS_AT_ONCE = 2**20

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
                more = _slice(first, _STAMPS_AT_ONCE, used)
                more_stamps = storage.stamp.sparse_read(more)
                is_used = more_stamps > FREE_STAMP
                stamps = tf.concat([stamps, tf.boolean_mask(more_stamps, is_used)], 0)
                numbers = tf.concat([numbers, tf.boolean_mask(more, is_used)], 0)
                return first + _STAMPS_AT_ONCE, *_oldest(stamps, numbers, missing)

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


# The most rows that are evicted while others wait for the mutex, and of how many rows they are looked for.
_EVICTED_AT_ONCE, _SEARCHED_AT_ONCE = 1000, 2**14
# A full table evicts the oldest of this many rows for each that is needed, and at least of the second number.
_CANDIDATES, _LEAST_CANDIDATES = 4, 2000

# The server prepares such a function once for all steps of a call, and one that is called in a branch only if that is
# taken. Otherwise the worker would, for each step: most of what a call of many steps would take to build.
_NOT_INLINED = {"_noinline": True}


class TableShard:
    """The part of a table on one parameter server. Created in the strategy's scope.

    Args:
      settings: of the table.
      device: of the server's CPU.
      capacity: the greatest number of rows here.
      number: unique among the tables of the strategy.

    Attributes:
      storage: the variables and the index.
      content: reads and writes all of it, in slices.
      rate: the learning rate, a variable; None if the optimizer computes it.
    """

    def __init__(self, settings: TableSettings, device: str, capacity: int, number: int) -> None:
        self.device = device
        self._settings = settings
        self.storage = ShardStorage(
            settings.name,
            device,
            capacity,
            settings.dim,
            settings.update.slots,
            settings.initializer,
            counts_waiting=settings.admission.counts,
            number=number,
        )
        self.content = ShardContent(self.storage, may_leave_out=settings.when_full != "error")
        rate = settings.update.learning_rate
        self.rate = None
        if rate is not None:
            with self.storage.placed():
                self.rate = tf.Variable(
                    lambda: tf.constant(rate, tf.float32), trainable=False, name=f"{settings.name}/rate"
                )
        # Traced once each, whatever functions use them.
        self._functions = {
            # Partial functions, as TensorFlow would count the tracings of all tables, and warn.
            method: tf.function(
                functools.partial(method),
                input_signature=signature,
                autograph=False,
                experimental_attributes=_NOT_INLINED,
            )
            for method, signature in (
                (self._find, [_KEYS]),
                (self._find_or_create, [_KEYS]),
                (self._gather_under_mutex, [_KEYS]),
                (self._create, [_KEYS]),
                (self._push, [_KEYS, tf.TensorSpec([None, settings.dim], tf.float32)]),
                (self._evict, [_NUMBER]),
            )
        }

    def lookup(self, keys: Any, *, training: bool) -> Any:
        """Returns the rows of keys, float32 [n, dim], on the server; the default for those that have none.

        Args:
          keys: int64 [n], each once.
          training: whether keys are counted and admitted.
        """
        return self._call(self._find_or_create if training else self._find, keys)

    def push(self, keys: Any, gradient: Any) -> None:
        """Updates the rows of keys with their gradients, and drops those of keys that have no row.

        Args:
          keys: int64 [n], each once.
          gradient: float32 [n, dim].
        """
        self._call(self._push, keys, gradient)

    def evict(self, first: Any) -> Any:
        """Evicts some of the next rows that the policies evict.

        Args:
          first: the number of the row to begin with, an int64 scalar.

        Returns:
          How many were evicted, and the row to go on with, or -1 after the last.
        """
        return self._call(self._evict, first)

    def _call(self, method: Any, *arguments: Any) -> Any:
        with tf.device(self.device):
            return self._functions[method](*arguments)

    # Look-ups.

    def _find(self, keys: Any) -> Any:
        """Returns the rows of keys that have one, and the default for the others."""
        return self._rows_of(keys)[0]

    def _find_or_create(self, keys: Any) -> Any:
        with tf.device(self.device):
            rows, found = self._rows_of(keys)
            return tf.cond(tf.reduce_all(found >= 0), lambda: rows, lambda: self._call(self._create, keys))

    def _rows_of(self, keys: Any) -> tuple[Any, Any]:
        """Returns the rows of keys, and their numbers; negative ones as the index has them."""
        counts = self.storage.counts
        with tf.device(self.device):
            before = counts.sparse_read(CHANGES)
            with tf.control_dependencies([before]):
                found = self.storage.find(keys)
            rows = self._gather(found)
            with tf.control_dependencies([rows]):
                after = counts.sparse_read(CHANGES)
            is_same = tf.logical_and(before == after, before % 2 == 0)
            return tf.cond(is_same, lambda: (rows, found), lambda: self._call(self._gather_under_mutex, keys))

    def _gather_under_mutex(self, keys: Any) -> tuple[Any, Any]:
        with self.storage.mutex.hold([keys]):
            found = self.storage.find(keys)
            return self._gather(found), found

    def _gather(self, found: Any) -> Any:
        is_there = found >= 0

        def with_default() -> Any:
            there = tf.where(is_there)[:, 0]
            rows = self.storage.rows.sparse_read(tf.gather(found, there))
            default = tf.fill([tf.size(found), self._settings.dim], self._settings.default)
            return tf.tensor_scatter_nd_update(default, there[:, tf.newaxis], rows)

        return tf.cond(tf.reduce_all(is_there), lambda: self.storage.rows.sparse_read(found), with_default)

    def _create(self, keys: Any) -> Any:
        """Counts and admits keys, and returns their rows."""
        storage, settings = self.storage, self._settings
        with storage.mutex.hold([keys]):
            found = storage.find(keys)
            unknown_at = tf.where(found < 0)[:, 0]
            unknown, entries = tf.gather(keys, unknown_at), tf.gather(found, unknown_at)
            times = UNKNOWN - entries
            is_admitted = settings.admission.admits(times)
            with operations_added() as admitted:
                self._admit(tf.boolean_mask(unknown, is_admitted), tf.boolean_mask(entries, is_admitted), found)
            if settings.admission.counts:
                is_waiting = tf.logical_not(is_admitted)
                waiting, before = tf.boolean_mask(unknown, is_waiting), tf.boolean_mask(times, is_waiting)
                with tf.control_dependencies(admitted), operations_added() as counted:
                    storage.wait(waiting, before + 1, before == 0)
                admitted += counted
            with tf.control_dependencies(admitted):
                # Again, since rows of a full table may have been evicted.
                return self._gather(storage.find(keys))

    def _admit(self, keys: Any, entries: Any, found: Any) -> None:
        """Gives rows to keys that have none, as far as there is room.

        Args:
          keys: int64 [n].
          entries: what the index has for them, int64 [n].
          found: what the index has for all keys of this look-up; their rows are not evicted.
        """
        storage = self.storage
        wanted = tf.size(keys, tf.int64)
        with operations_added() as made:
            self._make_room(wanted, found)
        with tf.control_dependencies(made):
            granted = tf.minimum(wanted, self._room())
        keys, entries = keys[:granted], entries[:granted]
        waited = tf.math.count_nonzero(entries < UNKNOWN)
        with operations_added() as written:
            numbers = storage.allocate(keys, storage.counts.sparse_read(CLOCK))
            storage.initialize(numbers, keys)
            storage.add_counts({WAITING: -waited, REFUSED: wanted - granted})
        with tf.control_dependencies(written):
            # A look-up that does not hold the mutex finds a key only when its row is there.
            storage.index.insert(keys, numbers)

    def _room(self) -> Any:
        counts = self.storage.counts.read_value()
        return self.storage.capacity - counts[USED] + counts[FREE]

    def _make_room(self, wanted: Any, found: Any) -> None:
        settings, storage = self._settings, self.storage
        if settings.when_full == "default_row":
            return
        missing = wanted - self._room()
        if settings.when_full == "error":
            text = (
                f"The table {settings.name} is full: {storage.device} has room for {storage.capacity} of its "
                f"{settings.capacity} rows. Create it with a larger capacity, call evict(), or set when_full."
            )
            tf.debugging.Assert(missing <= 0, [text])
            return
        tf.cond(missing > 0, lambda: self._evict_oldest(missing, found), lambda: tf.constant(0))

    # Gradients.

    def _push(self, keys: Any, gradient: Any) -> Any:
        storage = self.storage
        with storage.mutex.hold([keys, gradient]):
            numbers, gradient = _of_rows(storage.find(keys), gradient)
            step = storage.counts.sparse_read(CLOCK)
            rate = self._settings.update.rate_at(step) if self.rate is None else self.rate.read_value()
            rows = UnsharedRows(storage.rows, numbers)
            slots = {name: UnsharedRows(slot, numbers) for name, slot in storage.slots.items()}
            self._settings.update.update(rows, slots, gradient, step, rate)
            changed = [each for each in (rows, *slots.values()) if each.is_changed]

            def write_rows() -> None:
                for each in changed:
                    write(each.variable, numbers, each.value)

            storage.change_rows([each.value for each in changed], write_rows)
            write(storage.stamp, numbers, tf.fill(tf.shape(numbers), step + 1))
            storage.add_counts({CLOCK: 1, DROPPED: tf.size(keys, tf.int64) - tf.size(numbers, tf.int64)})
        return step

    # Eviction.

    def _evict(self, first: Any) -> tuple[Any, Any]:
        storage = self.storage
        with tf.device(self.device):
            used = storage.counts.sparse_read(USED)
            end = tf.minimum(first + _SEARCHED_AT_ONCE, used)
            found = self._to_evict(tf.range(first, end))
            some = found[:_EVICTED_AT_ONCE]
            number = tf.cond(tf.size(some) > 0, lambda: self._evict_some(some), lambda: tf.constant(0, tf.int64))
            following = tf.cond(tf.size(found) > _EVICTED_AT_ONCE, lambda: some[-1] + 1, lambda: end)
            return number, tf.where(following < used, following, tf.constant(-1, tf.int64))

    def _evict_some(self, numbers: Any) -> Any:
        with self.storage.mutex.hold([numbers]):
            still = self._to_evict(numbers)
            self.storage.release(still)
            return tf.size(still, tf.int64)

    def _to_evict(self, numbers: Any) -> Any:
        """Returns which of these rows are in use, and evicted by a policy."""
        storage = self.storage
        stamps = storage.stamp.sparse_read(numbers)
        ages = storage.counts.sparse_read(CLOCK) - stamps
        is_evicted = evicted(self._settings.eviction, lambda: storage.rows.sparse_read(numbers), ages)
        return tf.boolean_mask(numbers, tf.logical_and(stamps > FREE_STAMP, is_evicted))

    def _evict_oldest(self, missing: Any, found: Any) -> Any:
        """Evicts rows of a full table: the oldest of the next ones, without those of this look-up.

        All stamps are not looked at, as others wait meanwhile.
        """
        storage = self.storage
        counts = storage.counts.read_value()
        used = counts[USED]
        rows = tf.maximum(used, tf.constant(1, tf.int64))
        size = tf.minimum(used, tf.maximum(_CANDIDATES * missing, tf.constant(_LEAST_CANDIDATES, tf.int64)))
        candidates = (counts[HAND] + tf.range(size)) % rows
        needed = tf.sort(found)
        places = tf.searchsorted(needed, candidates)
        is_needed = tf.gather(needed, tf.minimum(places, tf.size(needed) - 1)) == candidates
        stamps = storage.stamp.sparse_read(candidates)
        candidates = tf.boolean_mask(candidates, tf.logical_and(stamps > FREE_STAMP, tf.logical_not(is_needed)))
        order = tf.argsort(storage.stamp.sparse_read(candidates), stable=True)
        oldest = tf.gather(candidates, order[: tf.cast(missing, tf.int32)])
        in_order(
            [oldest],
            lambda: storage.release(oldest),
            lambda: storage.counts.scatter_nd_update([[HAND]], [(counts[HAND] + size) % rows]),
        )
        return tf.constant(0)


def _of_rows(found: Any, gradient: Any) -> tuple[Any, Any]:
    """Returns the numbers of rows without those of keys that have none, and the gradients of these rows."""
    is_there = found >= 0

    def some() -> tuple[Any, Any]:
        at = tf.where(is_there)[:, 0]
        return tf.gather(found, at), tf.gather(gradient, at)

    return tf.cond(tf.reduce_all(is_there), lambda: (found, gradient), some)
